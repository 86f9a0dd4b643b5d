"""The training queue: FIFO, one message group per model, so the jobs of a model come in order."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import boto3
from botocore.exceptions import ClientError

from tuneyard.settings import settings

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient


@dataclass(frozen=True)
class Message:
    """A job that waits, and the receipt with which its message is kept or deleted."""

    job_id: str
    receipt: str


@lru_cache
def _client() -> SQSClient:
    return boto3.client("sqs")


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
