"""What event source mappings are on AWS: threads that hand the messages of a queue to a handler, many at a time.

The emulator has mappings of its own, each call a process of 50 MB that takes seconds to start. Threads cost nothing, so
here a webhook whose endpoint is slow holds no place that another one needs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient
    from mypy_boto3_sqs.type_defs import MessageTypeDef

AT_WORK = 4
"""Calls that may work at the same time; those that only wait for somebody's endpoint do not count."""
BATCH = 3
"""Messages that one call of the sender gets, each of which rings for up to ten deliveries."""
_DELETED = 10
"""Messages that one call deletes."""
Handler = Callable[[dict[str, Any], Any], dict[str, Any]]
logger = logging.getLogger("tuneyard.consumers")


class Consumer:
    """Takes messages from one queue, in at most ``most`` calls of its handler, each of at most ``batch`` messages.

    Failures stay in the queue. A message comes back after ``hidden`` seconds when we are killed with it in hand.
    ``waiting`` tells how many of the calls only wait for others at this moment.
    """

    def __init__(
        self,
        queue_url: str,
        handler: Handler,
        *,
        most: int,
        hidden: int,
        batch: int = 1,
        waiting: Callable[[], int] = lambda: 0,
    ) -> None:
        self.queue_url, self.handler, self.waiting = queue_url, handler, waiting
        self.most, self.hidden, self.batch = most, hidden, batch
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="consumer")
        self._client: SQSClient = boto3.client("sqs", config=Config(max_pool_connections=4))
        self._stopped, self._ended = threading.Event(), threading.Event()
        self._calls: set[Future[None]] = set()
        """The calls in hand."""
        self._done: SimpleQueue[str] = SimpleQueue()
        self._thread = threading.Thread(target=self._receive, daemon=True)

    def start(self) -> None:
        """Begin, in a thread."""
        self._thread.start()

    def stop(self, *, patience: float = 60) -> None:
        """Take nothing more, and wait for what is in hand, at most ``patience`` seconds; the rest comes back."""
        self._stopped.set()
        self._thread.join()
        self._pool.shutdown(wait=False)
        until = time.monotonic() + patience
        while self._calls and time.monotonic() < until:
            self._ended.wait(0.05)
            self._ended.clear()
        self._delete_done(least=1)

    def _receive(self) -> None:
        least = 1
        while not self._stopped.is_set():
            try:
                self._delete_done(least)
                if not self._has_room():
                    self._ended.wait(0.01)
                    self._ended.clear()
                    continue
                messages = self._next()
                least = _DELETED if len(messages) == self.batch else 1
                if messages:
                    call = self._pool.submit(self._work, messages)
                    self._calls.add(call)
                    call.add_done_callback(self._end)
            except Exception:
                logger.exception("queue cannot be read")
                self._stopped.wait(1)

    def _has_room(self) -> bool:
        calls = len(self._calls)
        return calls < self.most and calls - self.waiting() < AT_WORK

    def _next(self) -> list[MessageTypeDef]:
        answer = self._client.receive_message(
            QueueUrl=self.queue_url,
            MaxNumberOfMessages=self.batch,
            WaitTimeSeconds=1,
            VisibilityTimeout=self.hidden,
        )
        return answer.get("Messages", [])

    def _delete_done(self, least: int) -> None:
        """Take messages that were worked on off the queue, when there are enough; one that stays does no harm."""
        with suppress(Empty):
            while self._done.qsize() >= least:
                receipts = [self._done.get_nowait() for _ in range(min(_DELETED, self._done.qsize()))]
                entries: Any = [{"Id": str(n), "ReceiptHandle": one} for n, one in enumerate(receipts)]
                self._client.delete_message_batch(QueueUrl=self.queue_url, Entries=entries)

    def _work(self, messages: list[MessageTypeDef]) -> None:
        try:
            records = [{"messageId": one["MessageId"], "body": one["Body"]} for one in messages]
            failures = self.handler({"Records": records}, None)["batchItemFailures"]
            failed = {failure["itemIdentifier"] for failure in failures}
            for one in messages:
                if one["MessageId"] not in failed:
                    self._done.put(one["ReceiptHandle"])
        except Exception:
            logger.exception("messages failed")

    def _end(self, call: Future[None]) -> None:
        self._calls.discard(call)
        self._ended.set()
