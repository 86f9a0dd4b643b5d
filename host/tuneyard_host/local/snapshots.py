"""The emulator's state on disk: whole snapshots, each of one moment, the last complete one named ``current``.

ministack keeps tables, queues and functions in memory and saves them only when it ends in good order. Here a fork
of the process writes them every few seconds when something changed: the copy has all services as they were in the
same instant, requests go on meanwhile, and only a complete snapshot becomes ``current``. What kill -9 can cost
is what changed since then. Objects are not part of it: they are files from the moment their PUT is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import os
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from ministack import app as ministack
from ministack.core import persistence
from ministack.services import lambda_svc

logger = logging.getLogger("tuneyard.snapshots")
SHORTEST_PAUSE, LONGEST_PAUSE = 2.0, 10.0
SHARE_OF_TIME = 0.05
"""How much of a core snapshots may take when things change all the time."""
SETTLING_SECONDS = 5.0
"""How long after a request things may still move: an event reaches its queue after its call was answered."""

KEPT = {
    "apigateway_v1", "cloudformation", "cloudwatch", "cloudwatch_logs", "dynamodb", "eventbridge", "iam", "lambda",
    "s3", "scheduler", "secretsmanager", "sqs",
}  # fmt: skip
"""The services that template.yaml names: a restart loads what a snapshot holds, and the other forty take a second."""


class NotSaved(Exception):
    """A snapshot could not be written; the last complete one stands."""


class Snapshots:
    """Writes snapshots into a folder while the emulator runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failures = 0
        """Snapshots in a row that could not be written."""
        self._changed = 0.0
        self._saved = 0.0
        self._busy = asyncio.Lock()

    def changed(self) -> None:
        """Note that a request may have changed something."""
        self._changed = time.monotonic()

    async def keep(self) -> None:
        """Save for ever: soon after a change, and never so often that it costs more than its share of a core."""
        took = 0.0
        while True:
            await asyncio.sleep(min(max(SHORTEST_PAUSE, took / SHARE_OF_TIME), LONGEST_PAUSE))
            if self._changed + SETTLING_SECONDS > self._saved:
                began = time.monotonic()
                with contextlib.suppress(NotSaved):
                    await self.save()
                took = time.monotonic() - began

    async def save(self) -> None:
        """Write a snapshot of this moment; NotSaved when it cannot be written or a deployment is under way."""
        async with self._busy:
            if _deploying():
                raise NotSaved("a deployment is under way")
            self._saved = time.monotonic()
            await self._counting_failures()

    def save_at_the_end(self) -> None:
        """Write a snapshot in this process, when nothing else runs in it any more."""
        if not _deploying():
            write(self.folder)

    async def _counting_failures(self) -> None:
        try:
            if sys.platform == "linux":
                await _in_a_fork(self.folder)
            else:  # a fork of a threaded process is not safe elsewhere
                write(self.folder)
        except (OSError, NotSaved) as error:
            self.failures += 1
            self._saved = 0.0
            logger.error("snapshot failed, %d in a row: %s", self.failures, error)
            raise NotSaved(str(error)) from error
        self.failures = 0


def look_at(snapshot: Path) -> None:
    """Have ministack read and write this snapshot; other modules keep keys of their own in its STATE_DIR."""
    persistence.STATE_DIR = str(snapshot)
    lambda_svc.CODE_BLOB_DIR = str(snapshot / "lambda-blobs")


def write(folder: Path) -> None:
    """Write every service's state into a new folder beside the others, then call it ``current``."""
    target = folder / f"snapshot-{time.time_ns()}"
    target.mkdir()
    look_at(target)
    for name, get_state in ministack._build_persistence_save_dict().items():
        if name not in KEPT or (state := get_state()) is None:
            continue
        persistence.save_state(name, state)
        if not (target / f"{name}.json").exists():  # save_state logs what went wrong and goes on
            raise NotSaved(f"the state of {name} could not be written")
    _make_durable(target)
    current = folder / "current"
    beside = folder / "current.new"
    beside.unlink(missing_ok=True)
    beside.symlink_to(target.name)
    os.replace(beside, current)
    tidy(folder)


def tidy(folder: Path) -> None:
    """Remove the snapshots that ``current`` does not name."""
    current = folder / "current"
    kept = os.readlink(current) if current.is_symlink() else None
    for old in folder.glob("snapshot-*"):
        if old.name != kept:
            shutil.rmtree(old, ignore_errors=True)


async def _in_a_fork(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child runs nothing but write()
        child = os.fork()
    if child == 0:
        os._exit(_write_and_tell(folder))
    status = await asyncio.to_thread(os.waitpid, child, 0)
    if status[1] != 0:
        raise NotSaved(f"its process ended with status {os.waitstatus_to_exitcode(status[1])}")


def _write_and_tell(folder: Path) -> int:
    copy.deepcopy = _itself  # type: ignore[assignment]  # this process is the copy
    try:
        os.nice(5)
        write(folder)
    except BaseException:
        logger.exception("snapshot failed")
        return 1
    return 0


def _itself(value: Any, *_: Any) -> Any:
    return value


def _deploying() -> bool:
    """Whether a stack is changing: a snapshot of it half done could not be continued after a restart."""
    stacks = sys.modules.get("ministack.services.cloudformation")
    return stacks is not None and any(
        stack.get("StackStatus", "").endswith("_IN_PROGRESS") for stack in stacks._stacks._data.values()
    )


def _make_durable(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
