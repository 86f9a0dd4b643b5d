"""From events to webhooks: match the event queue, send the delivery queue, sweep every minute."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tuneyard import clock, deliveries, matcher, sender, web, workers
from tuneyard.queues import Ring
from tuneyard.table import Place


def match(event: dict[str, Any], context: object) -> dict[str, Any]:  # noqa: ARG001
    """Match events, and further pages of events, with automations."""
    return _each(event, _match)


def send(event: dict[str, Any], context: object) -> dict[str, Any]:  # noqa: ARG001
    """Send deliveries that are due, side by side, so that a slow endpoint holds up its own alone."""
    if len(event["Records"]) == 1:
        return _each(event, _send)
    with ThreadPoolExecutor(len(event["Records"])) as pool:
        return _each(event, _send, pool.map)


def sweep(event: dict[str, Any], context: object) -> None:  # noqa: ARG001
    """Move on what stands still."""
    deliveries.sweep(clock.now_ms())
    workers.seen("sender", "sweep")


def _match(body: dict[str, Any]) -> None:
    if "detail" in body:
        matcher.match(body["detail"]["id"], now=clock.now_ms())
        return
    after = Place(*body["after"]) if body["after"] else None
    matcher.match(body["event_id"], now=clock.now_ms(), scope=body["scope"], after=after)


def _send(body: dict[str, Any]) -> None:
    sender.send(Ring(**body), now=clock.now_ms())


def _each(
    event: dict[str, Any], work: Callable[[dict[str, Any]], None], over: Callable[..., Iterable[bool]] = map
) -> dict[str, Any]:
    """Work on each message; one that fails by a bug of ours comes back, and at last goes to the dead letters."""

    def well(record: dict[str, Any]) -> bool:
        try:
            work(json.loads(record["body"]))
        except Exception:
            web.logger.exception("message failed", message_id=record["messageId"])
            return False
        return True

    records = event["Records"]
    failed = [record for record, good in zip(records, over(well, records), strict=True) if not good]
    return {"batchItemFailures": [{"itemIdentifier": record["messageId"]} for record in failed]}
