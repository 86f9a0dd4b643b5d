"""The body of a delivery: a JSON template whose strings may hold ``${variables}``.

A template is parsed before it is filled, and only its strings are filled, once and from left to right. So no value can
break the JSON, add a key, or be expanded again, whatever is written in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from tuneyard.clock import iso
from tuneyard.errors import Invalid
from tuneyard.records import ArtifactEvent

MOST_TEMPLATE_BYTES = 32 * 1024
MOST_BODY_BYTES = 256 * 1024
MOST_DEPTH = 32
MASK = "***"
ACCESS_TOKEN = "ACCESS_TOKEN"  # noqa: S105  the name of a variable
METADATA = "artifact_metadata."
NAMES = (
    "project_name", "entity_name", "event_type", "event_author", "alias", "tag",
    "artifact_collection_name", "artifact_version", "artifact_version_string",
)  # fmt: skip
"""The variables of the specification; ``artifact_metadata.<KEY>`` and the secrets come on top."""
MORE_NAMES = (
    "event_id", "event_time", "run_id", "run_name", "run_user", "metric_name", "metric_value", "metric_threshold",
    "job_id", "job_kind", "job_state", "model_id", "error_message",
)  # fmt: skip
"""Variables of ours, for the events of runs and jobs."""
RESERVED = frozenset([*NAMES, *MORE_NAMES, ACCESS_TOKEN, "artifact_metadata"])
_VARIABLE = re.compile(r"\$\$\{|\$\{([^}]*)(\})?")
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


class Unrenderable(Exception):
    """A body cannot be made of this template and these values; the text is a sentence."""


def check(template: str, *, secret: str | None) -> None:
    """Invalid, with what is wrong and where, when a template cannot be rendered with any values.

    ``secret`` is the name of the secret that is attached to the webhook, which the template may use.
    """
    known = {*NAMES, *MORE_NAMES, ACCESS_TOKEN, *([secret] if secret else [])}

    def name_it(name: str) -> str:
        if name not in known and not (name.startswith(METADATA) and name != METADATA):
            raise Unrenderable(
                f"${{{name[:80]}}} is no variable. There are: {', '.join(sorted(known))} and {METADATA}<KEY>. "
                "Write $${ for a literal ${."
            )
        return ""

    try:
        _fill(_parse(template), name_it)
    except Unrenderable as error:
        raise Invalid(f"The payload cannot be used: {error}", param="payload") from error


def render(
    template: str | None, event: ArtifactEvent, more: Mapping[str, str], secrets: Mapping[str, str]
) -> bytes:
    """The body: the template with its variables filled, or without one type, time and all that is no secret."""
    values = variables(event) | dict(more)
    if template is None:
        data: dict[str, Any] = {name: value for name, value in values.items() if name in NAMES or value}
        data["artifact_metadata"] = event.metadata
        return _bytes({"type": event.type.value, "timestamp": iso(event.created_at), "data": data})

    def value_of(name: str) -> str:
        if name in secrets:
            return secrets[name]
        if name in RESERVED:
            return values.get(name, "")
        if name.startswith(METADATA):
            return text(event.metadata.get(name.removeprefix(METADATA)))
        raise Unrenderable(
            f"${{{name[:80]}}} is no variable any more: the webhook has another secret now, or none. "
            "Change the payload or the webhook, then send the delivery again."
        )

    return _bytes(_fill(_parse(template), value_of))


def variables(event: ArtifactEvent) -> dict[str, str]:
    """The variables of an event that are no secrets and no metadata; what an event does not have is empty."""
    collection = (event.collection or "").rpartition("/")[2]
    uri = f"{event.collection}:{event.version_name}" if event.collection and event.version_name else ""
    data = event.data
    return {
        "project_name": event.project,
        "entity_name": event.entity,
        "event_type": event.type.value,
        "event_author": event.author,
        "alias": event.alias or "",
        "tag": event.tag or "",
        "artifact_collection_name": collection,
        "artifact_version": f"wandb-artifact:///{uri}" if uri else "",
        "artifact_version_string": f"{event.collection}:{event.alias}" if event.alias else uri,
        "event_id": event.id,
        "event_time": iso(event.created_at),
        "run_id": event.run_id or "",
        "run_name": text(data.get("run_name")),
        "run_user": text(data.get("run_user")),
        "job_id": text(data.get("job_id")),
        "job_kind": text(data.get("kind")),
        "job_state": text(data.get("state")),
        "model_id": text(data.get("model_id")),
        "error_message": text(data.get("error_message")),
    }


def text(value: Any) -> str:
    """A value as a variable shows it: text as it is, nothing as nothing, anything else as compact JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def shown(template: str | None, event: ArtifactEvent, more: Mapping[str, str]) -> bytes:
    """The body as it may be shown: whatever is no other variable is, or was, a secret, and is masked."""
    return render(template, event, more, _Masked())


def is_text(value: Any) -> bool:
    """Whether a value can be written as JSON in UTF-8: half a surrogate pair and numbers without end cannot."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (UnicodeEncodeError, ValueError, RecursionError):
        return False
    return True


class _Masked(dict[str, str]):
    """Every secret that a webhook may have had, and none of their values."""

    def __contains__(self, name: object) -> bool:
        return name == ACCESS_TOKEN or (name not in RESERVED and not str(name).startswith(METADATA))

    def __missing__(self, name: str) -> str:
        return MASK


def _parse(template: str) -> dict[str, Any]:
    if not is_text(template) or len(template.encode()) > MOST_TEMPLATE_BYTES:
        raise Unrenderable(f"it is larger than {MOST_TEMPLATE_BYTES // 1024} KB, or no valid Unicode.")
    if _depth(template) > MOST_DEPTH:
        raise Unrenderable(f"it is nested more than {MOST_DEPTH} levels deep.")
    try:
        parsed = json.loads(
            template, object_pairs_hook=_object, parse_constant=_no_number, parse_float=_number
        )
    except json.JSONDecodeError as error:
        raise Unrenderable(
            f"it is not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}. A variable can stand "
            "inside a string only, within quotes."
        ) from error
    except ValueError as error:
        raise Unrenderable(f"{error}.") from error
    if not isinstance(parsed, dict):
        raise Unrenderable('it must be a JSON object, as in {"text": "..."}.')
    if not is_text(parsed):
        raise Unrenderable("it holds half of a surrogate pair, which is no valid Unicode.")
    return parsed


def _depth(template: str) -> int:
    """How deep brackets are nested outside of strings; counted first, because a deep one would break the parser."""
    deepest = depth = 0
    for found in _BRACKETS.finditer(template):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        deepest = max(deepest, depth)
    return deepest


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice = next(name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1)
        raise ValueError(f"the key {twice[:80]!r} is there twice in one object")
    for name in made:
        if "${" in name:
            raise ValueError(f"the key {name[:80]!r} holds a variable; variables can stand in values only")
    return made


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _number(digits: str) -> float:
    number = float(digits)
    if abs(number) == float("inf"):
        raise ValueError(f"the number {digits[:40]} is too large")
    return number


def _fill(node: Any, value_of: Callable[[str], str]) -> Any:
    """The parsed template with its strings filled; stops as soon as the body would be too large."""
    room = MOST_BODY_BYTES

    def filled(found: re.Match[str]) -> str:
        nonlocal room
        if found[0] == "$${":
            return "${"
        if found[2] is None:
            raise Unrenderable(
                f"the variable {found[0][:80]!r} has no closing brace. Write $${{ for a literal ${{."
            )
        value = value_of(found[1])
        room -= len(value)
        if room < 0:
            raise Unrenderable(_TOO_LARGE)
        return value

    def walk(node: Any) -> Any:
        if isinstance(node, str):
            return _VARIABLE.sub(filled, node)
        if isinstance(node, dict):
            return {name: walk(value) for name, value in node.items()}
        return [walk(value) for value in node] if isinstance(node, list) else node

    return walk(node)


def _bytes(body: dict[str, Any]) -> bytes:
    written = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    if len(written) > MOST_BODY_BYTES:
        raise Unrenderable(_TOO_LARGE)
    return written


_TOO_LARGE = f"The body would be larger than {MOST_BODY_BYTES // 1024} KB. Use fewer or smaller variables."
