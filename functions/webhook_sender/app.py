"""From events to webhooks: match the event queue, send the delivery queue, sweep every minute."""

from __future__ import annotations

import itertools
import json
from typing import Any

from tuneyard import clock, deliveries, matcher, sender, web, workers
from tuneyard.queues import Ring, heard
from tuneyard.table import Place


def match(event: dict[str, Any], context: object) -> dict[str, Any]:  # noqa: ARG001
    """Match events with automations, a page at a time, and send again what many were asked for, a piece at a time."""
    failed: dict[str, Exception] = {}
    for record in event["Records"]:
        try:
            _match(json.loads(record["body"]))
        except Exception as error:
            failed[record["messageId"]] = error
    return _left(failed)


def send(event: dict[str, Any], context: object) -> dict[str, Any]:  # noqa: ARG001
    """Send deliveries that are due, side by side, so that a slow endpoint holds up its own alone."""
    rings: dict[str, list[Ring]] = {}
    failed: dict[str, Exception] = {}
    for record in event["Records"]:
        try:
            rings[record["messageId"]] = heard(record["body"])
        except Exception as error:
            failed[record["messageId"]] = error
    wrong = sender.send(*itertools.chain(*rings.values()), now=clock.now_ms())
    return _left(failed | {id: wrong[ring] for id, some in rings.items() for ring in some if ring in wrong})


def sweep(event: dict[str, Any], context: object) -> None:  # noqa: ARG001
    """Move on what stands still."""
    deliveries.sweep(clock.now_ms())
    workers.seen("sender", "sweep")


def _match(body: dict[str, Any]) -> None:
    now = clock.now_ms()
    if "detail" in body:
        matcher.match(body["detail"]["id"], now=now)
    elif "webhook_id" in body:
        deliveries.go_on(body["webhook_id"], since=body["since"], after=Place(*body["after"]), now=now)
    else:
        after = Place(*body["after"]) if body["after"] else None
        matcher.match(body["event_id"], now=now, scope=body["scope"], after=after)


def _left(failed: dict[str, Exception]) -> dict[str, Any]:
    """Messages that failed by a bug of ours, or since AWS did: they come back, and at last go to the dead letters."""
    for id, error in failed.items():
        web.logger.error("message failed", message_id=id, exc_info=error)
    return {"batchItemFailures": [{"itemIdentifier": id} for id in failed]}
