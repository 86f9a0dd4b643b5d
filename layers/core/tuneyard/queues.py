"""The queues: training (FIFO, one group per model, so the jobs of a model come in order), events, deliveries."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from tuneyard.once import Once
from tuneyard.settings import USER_AGENT, settings
from tuneyard.webhook_records import Delivery

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient


@dataclass(frozen=True)
class Message:
    """A job that waits, and the receipt with which its message is kept or deleted."""

    job_id: str
    receipt: str


@Once
def _client() -> SQSClient:
    return boto3.client("sqs", config=Config(user_agent=USER_AGENT, max_pool_connections=64))


def send_job(job_id: str, *, model_id: str, ring: int = 0) -> None:
    """Tell the trainers that a job waits. ``ring`` tells a repeated call from a repeated delivery of the same one."""
    _client().send_message(
        QueueUrl=settings().training_queue_url,
        MessageBody=json.dumps({"job_id": job_id}),
        MessageGroupId=model_id,
        MessageDeduplicationId=f"{job_id}-{ring}",
    )


def receive_job(*, wait_seconds: int, visible_after: int) -> Message | None:
    """The next job, hidden from other trainers for ``visible_after`` seconds; None when none came in time."""
    answer = _client().receive_message(
        QueueUrl=settings().training_queue_url,
        MaxNumberOfMessages=1,
        WaitTimeSeconds=wait_seconds,
        VisibilityTimeout=visible_after,
    )
    for message in answer.get("Messages", []):
        return Message(json.loads(message["Body"])["job_id"], message["ReceiptHandle"])
    return None


def hide(message: Message, seconds: int) -> None:
    """Keep a message hidden for ``seconds`` from now; one that is gone already is left alone."""
    try:
        _client().change_message_visibility(
            QueueUrl=settings().training_queue_url, ReceiptHandle=message.receipt, VisibilityTimeout=seconds
        )
    except ClientError as error:
        if error.response["Error"]["Code"] not in _GONE:
            raise


def delete(message: Message) -> None:
    """Take a message off the queue; one that is gone already is left alone."""
    try:
        _client().delete_message(QueueUrl=settings().training_queue_url, ReceiptHandle=message.receipt)
    except ClientError as error:
        if error.response["Error"]["Code"] not in _GONE:
            raise


class Ring(NamedTuple):
    """That a delivery is due; stale when the delivery's ``rev`` is another by the time it is heard."""

    delivery_id: str
    rev: int
    webhook_id: str
    automation_id: str
    event_id: str
    line: bool = False
    """Whether others wait in line for the same webhook."""

    @classmethod
    def of(cls, delivery: Delivery, *, line: bool = False) -> Ring:
        """The ring for a delivery as it is now, with what the sender has to read."""
        return cls(
            delivery.id, delivery.rev, delivery.webhook_id, delivery.automation_id, delivery.event_id, line
        )


LONGEST_DELAY = 900
"""Seconds that a message can be held back."""
_RINGS, _ENTRIES = 10, 10
"""Deliveries that one message rings for, and messages in one call."""


def ring(*rings: Ring, delay: int = 0) -> None:
    """Tell the senders of deliveries that are due in ``delay`` seconds; raises when a message could not be sent."""
    ring_each([(one, delay) for one in rings])


def ring_each(rings: list[tuple[Ring, int]]) -> None:
    """Tell the senders of deliveries, of each as many seconds from now as stand beside it."""
    together: dict[int, list[Ring]] = {}
    for one, delay in rings:
        together.setdefault(max(0, min(delay, LONGEST_DELAY)), []).append(one)
    messages = [
        {"MessageBody": json.dumps({"rings": some[start : start + _RINGS]}), "DelaySeconds": delay}
        for delay, some in together.items()
        for start in range(0, len(some), _RINGS)
    ]
    for start in range(0, len(messages), _ENTRIES):
        entries: Any = [{"Id": str(n)} | one for n, one in enumerate(messages[start : start + _ENTRIES])]
        answer = _client().send_message_batch(QueueUrl=settings().delivery_queue_url, Entries=entries)
        if failed := answer.get("Failed"):
            raise NotSent(failed[0].get("Message", "no reason given"))


def heard(body: str) -> list[Ring]:
    """What a message rings for."""
    return [Ring(*one) for one in json.loads(body)["rings"]]


def send_page(event_id: str, *, scope: str, after: tuple[int, str] | None) -> None:
    """Ask for the next page of the automations of a scope to be matched with an event."""
    body = json.dumps({"event_id": event_id, "scope": scope, "after": after})
    _client().send_message(QueueUrl=settings().event_queue_url, MessageBody=body)


def send_piece(webhook_id: str, *, since: int | None, after: tuple[int, str]) -> None:
    """Ask for the next piece of a webhook's deliveries to be sent again: of the held ones, or of those that failed."""
    body = json.dumps({"webhook_id": webhook_id, "since": since, "after": after})
    _client().send_message(QueueUrl=settings().event_queue_url, MessageBody=body)


class NotSent(Exception):
    """The queue took the call and refused a message."""


def waiting(queue_url: str) -> int:
    """About how many messages wait in a queue; raises when it cannot be reached."""
    answer = _client().get_queue_attributes(
        QueueUrl=queue_url, AttributeNames=["ApproximateNumberOfMessages"]
    )
    return int(answer["Attributes"]["ApproximateNumberOfMessages"])


_GONE = {
    "ReceiptHandleIsInvalid",
    "InvalidParameterValue",
    "MessageNotInflight",
    "AWS.SimpleQueueService.MessageNotInflight",
}
