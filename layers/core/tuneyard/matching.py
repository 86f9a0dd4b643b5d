"""Whether an event is one that an automation listens for. Pure; regular expressions are RE2's, so none is slow."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import re2

from tuneyard.errors import Invalid
from tuneyard.records import ArtifactEvent, EventType
from tuneyard.webhook_records import Automation, Comparison, MetricRule

MOST_PATTERN, MOST_TEXT = 256, 512
_AGGREGATES: dict[str, Callable[[list[float]], float]] = {
    "last": lambda values: values[0],
    "min": min,
    "max": max,
    "avg": lambda values: math.fsum(value / len(values) for value in values),
}


def check_pattern(pattern: str, *, param: str) -> None:
    """Invalid, with RE2's own words, for a pattern that it refuses."""
    if len(pattern) > MOST_PATTERN:
        raise Invalid(
            f"A pattern has at most {MOST_PATTERN} characters; this one has {len(pattern)}.", param=param
        )
    try:
        _compiled(pattern)
    except (re2.error, UnicodeEncodeError) as error:
        reason = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else error
        raise Invalid(
            f"{pattern[:80]!r} is no regular expression that RE2 takes: {reason}. Look-around and back-references "
            "are not there.",
            param=param,
        ) from error


def found(pattern: str | None, text: str) -> bool:
    """Whether a pattern occurs anywhere in a text; no pattern takes every text."""
    return pattern is None or _compiled(pattern).search(text[:MOST_TEXT]) is not None


def listens(automation: Automation, event: ArtifactEvent) -> bool:
    """Whether the event passes the automation's filters; a metric is still to be held against its threshold."""
    if not automation.enabled or automation.event is not event.type:
        return False
    match event.type:
        case EventType.ADD_ARTIFACT_ALIAS:
            return found(automation.alias_regex, event.alias or "")
        case EventType.ADD_ARTIFACT_TAG:
            return found(automation.tag_regex, event.tag or "")
        case EventType.LINK_ARTIFACT:
            return True
        case EventType.RUN_METRIC:
            rule = automation.metric
            return (
                rule is not None
                and rule.name in event.data.get("metrics", {})
                and _run_passes(automation, event)
            )
        case EventType.RUN_STATE:
            states = automation.run_states
            return (not states or event.data.get("state") in states) and _run_passes(automation, event)
    return False


def metric(rule: MetricRule, values: list[float]) -> float | None:
    """What a metric's last values come to when that is past the threshold, else None; the newest value is first.

    Fewer values than the window holds are taken as they are.
    """
    seen = values[: 1 if rule.aggregate == "last" else rule.window]
    if not seen:
        return None
    value = _AGGREGATES[rule.aggregate](seen)
    return value if _past(value, rule.comparison, rule.threshold) else None


def _past(value: float, comparison: Comparison, threshold: float) -> bool:
    match comparison:
        case Comparison.GREATER:
            return value > threshold
        case Comparison.AT_LEAST:
            return value >= threshold
        case Comparison.LESS:
            return value < threshold
        case Comparison.AT_MOST:
            return value <= threshold
        case Comparison.EQUAL:
            return value == threshold
        case Comparison.OTHER:
            return value != threshold


def _run_passes(automation: Automation, event: ArtifactEvent) -> bool:
    return automation.run_user in (None, event.data.get("run_user")) and found(
        automation.run_name_regex, str(event.data.get("run_name", ""))
    )


@lru_cache(maxsize=2048)
def _compiled(pattern: str) -> Any:
    options = re2.Options()
    options.log_errors = False
    options.max_mem = 1 << 20
    return re2.compile(pattern, options)
