"""The trainer: takes jobs off the queue one at a time, and sees each of them to its end.

A job may be run again from its start at any time: it makes the same events and the same files, and what is written
already is not written twice.
"""

from __future__ import annotations

import errno
import threading
import time
from types import TracebackType
from typing import Self

import torch
from aws_lambda_powertools import Logger
from botocore.exceptions import BotoCoreError, ClientError

from tuneyard import leases, queues, workers
from tuneyard.errors import TrainingError
from tuneyard.leases import Lost, NotYet
from tuneyard.records import Job
from tuneyard.settings import settings
from tuneyard_host import bases
from tuneyard_host.training import work, world
from tuneyard_host.training.protection import protected
from tuneyard_host.training.work import Stopped, Teller

logger = Logger(service="trainer")
_SEEN_EVERY_SECONDS = 20


def serve(*, name: str, stop: threading.Event, shard: bool = False) -> None:
    """Train jobs until told to stop; ``name`` belongs to this process alone, so its earlier life's jobs are its own.

    Under torchrun process 0 does that, and the others compute with it. ``shard`` spreads the base model over them.
    """
    for spec in settings().base_models[:1]:
        bases.load(spec)
    if world.rank():
        _follow(shard=shard)
        return
    for job in leases.left_behind(name):
        _take(job.id, None, name=name, stop=stop, shard=shard)
    seen = -_SEEN_EVERY_SECONDS * 1.0
    while not stop.is_set():
        if time.monotonic() - seen > _SEEN_EVERY_SECONDS:
            workers.seen("trainer", name)
            world.agreed(None)
            seen = time.monotonic()
        message = queues.receive_job(wait_seconds=2, visible_after=round(settings().lease_seconds))
        if message is not None:
            _take(message.job_id, message, name=name, stop=stop, shard=shard)
    world.agreed("stop")


def _follow(*, shard: bool) -> None:
    """Compute with process 0 whatever it takes on, until it stops."""
    while (order := world.agreed(None)) != "stop":
        if isinstance(order, tuple):
            try:
                work.follow(*order, shard=shard)
            except TrainingError:
                logger.info("job failed here as it does in process 0")


def _take(
    job_id: str, message: queues.Message | None, *, name: str, stop: threading.Event, shard: bool
) -> None:
    try:
        job = leases.claim(job_id, worker=name)
    except NotYet:
        if message is not None:
            queues.hide(message, 1)
        return
    if job is not None:
        with protected(), Heartbeat(job, message, name):
            _train(job, stop, shard=shard)
    if message is not None:
        queues.delete(message)


def _train(job: Job, stop: threading.Event, *, shard: bool) -> None:
    """Run a job to its end, whatever that is: what is wrong with its data ends the job, and the worker lives.

    AWS out of reach is not the job's fault: that ends the worker, and the job goes on when a worker is back.
    """
    teller = Teller(job, stop)
    try:
        work.run(job, teller, shard=shard)
        logger.info("job succeeded", job_id=job.id)
    except TrainingError as error:
        _fail(teller.job, str(error))
    except (MemoryError, torch.OutOfMemoryError):
        _fail(
            teller.job,
            "The worker ran out of memory before its first step. Send less in one job, or use a larger worker.",
        )
    except Lost:
        logger.warning("job is no longer ours", job_id=job.id)
    except Stopped:
        leases.release(teller.job)
        logger.info("job given back", job_id=job.id)
    except (ClientError, BotoCoreError):
        raise
    except Exception as error:
        logger.exception("job hit a bug", job_id=job.id)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            _fail(teller.job, "The disk of the worker is full. Make room on it, then send the job again.")
            return
        _fail(
            teller.job,
            f"Training stopped on an internal error ({type(error).__name__}), which was logged. Report it.",
        )


def _fail(job: Job, reason: str) -> None:
    logger.warning("job failed", job_id=job.id, reason=reason)
    try:
        leases.fail(job, reason)
    except Lost:
        logger.warning("job is no longer ours", job_id=job.id)


class Heartbeat:
    """Keeps a job's lease and its message while a worker is at it."""

    def __init__(self, job: Job, message: queues.Message | None, name: str) -> None:
        self._job, self._message, self._name = job, message, name
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _beat(self) -> None:
        """Renew until done. What goes wrong here is told by the next event, which the lost lease refuses."""
        while not self._done.wait(settings().lease_seconds / 3):
            try:
                leases.renew(self._job)
                workers.seen("trainer", self._name)
                if self._message is not None:
                    queues.hide(self._message, round(settings().lease_seconds))
            except Lost:
                return
            except (ClientError, BotoCoreError):
                logger.exception("heartbeat failed", job_id=self._job.id)
