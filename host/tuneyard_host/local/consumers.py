"""What event source mappings are on AWS: threads that hand the messages of a queue to a handler, many at a time.

The emulator has mappings of its own, each call a process of 50 MB that takes seconds to start. Threads cost nothing, so
here a webhook whose endpoint is slow holds no place that another one needs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient
    from mypy_boto3_sqs.type_defs import MessageTypeDef

Handler = Callable[[dict[str, Any], Any], dict[str, Any]]
logger = logging.getLogger("tuneyard.consumers")


class Consumer:
    """Takes messages from one queue, at most ``most`` in hand, each as a batch of one; failures stay in the queue.

    A message comes back after ``hidden`` seconds when we are killed with it in hand.
    """

    def __init__(self, queue_url: str, handler: Handler, *, most: int, hidden: int) -> None:
        self.queue_url, self.handler, self.most, self.hidden = queue_url, handler, most, hidden
        self._places = threading.Semaphore(most)
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="consumer")
        self._client: SQSClient = boto3.client("sqs", config=Config(max_pool_connections=most + 1))
        self._stopped = threading.Event()
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
        for _ in range(self.most):
            self._places.acquire(timeout=max(0.0, until - time.monotonic()))
        while not self._done.empty():
            self._delete_done()

    def _receive(self) -> None:
        while not self._stopped.is_set():
            self._places.acquire()
            places = 1
            while places < 10 and self._places.acquire(blocking=False):
                places += 1
            try:
                self._delete_done()
                for message in self._next(places):
                    self._pool.submit(self._work, message)
                    places -= 1
            except Exception:
                logger.exception("queue cannot be read")
                self._stopped.wait(1)
            for _ in range(places):
                self._places.release()

    def _next(self, most: int) -> list[MessageTypeDef]:
        answer = self._client.receive_message(
            QueueUrl=self.queue_url,
            MaxNumberOfMessages=most,
            WaitTimeSeconds=1,
            VisibilityTimeout=self.hidden,
        )
        return answer.get("Messages", [])

    def _delete_done(self) -> None:
        """Take ten messages that were worked on off the queue; one that stays comes back, which does no harm."""
        with suppress(Empty):
            while receipts := [self._done.get_nowait() for _ in range(min(10, self._done.qsize()))]:
                entries: Any = [{"Id": str(n), "ReceiptHandle": one} for n, one in enumerate(receipts)]
                self._client.delete_message_batch(QueueUrl=self.queue_url, Entries=entries)

    def _work(self, message: MessageTypeDef) -> None:
        try:
            record = {"messageId": message["MessageId"], "body": message["Body"]}
            if not self.handler({"Records": [record]}, None)["batchItemFailures"]:
                self._done.put(message["ReceiptHandle"])
        except Exception:
            logger.exception("message failed")
        finally:
            self._places.release()
