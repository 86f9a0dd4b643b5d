"""The event bus: artifact and run events leave here, and EventBridge rules route them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import boto3

from tuneyard.once import Once
from tuneyard.records import ArtifactEvent
from tuneyard.settings import settings

if TYPE_CHECKING:
    from mypy_boto3_events import EventBridgeClient

SOURCE = "tuneyard"


class NotPublished(Exception):
    """The bus took the call and refused an entry; the event row stays unpublished and the sweep tries again."""


@Once
def _client() -> EventBridgeClient:
    return boto3.client("events")


def detail(event: ArtifactEvent) -> str:
    """What rules on the bus see of an event."""
    return event.model_dump_json(exclude_none=True, exclude={"metadata"})


def publish(event: ArtifactEvent) -> None:
    """Put an event on the bus. Its ``id`` is ours: EventBridge's own changes when a call is repeated."""
    answer = _client().put_events(
        Entries=[
            {
                "EventBusName": settings().bus_name,
                "Source": SOURCE,
                "DetailType": event.type,
                "Detail": detail(event),
            }
        ]
    )
    if answer["FailedEntryCount"]:
        raise NotPublished(answer["Entries"][0].get("ErrorMessage", "no reason given"))
