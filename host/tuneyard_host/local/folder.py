"""The state folder: everything a local Tuneyard keeps, and the lock that only one of them may hold."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

LEAST_FREE_BYTES, MOST_LOG_BYTES = 200_000_000, 10_000_000


class LocalError(Exception):
    """Something that the person at the keyboard can put right; its text is one sentence that says how."""


class Folder:
    """A state folder, locked from ``with`` to its end.

    key               the first API key, readable by its owner alone
    remembered.json   ports and tokens that stay the same from one start to the next
    environment.json  what the processes of the running stack have in their environment
    aws/              the emulator's snapshots and objects
    logs/  tmp/       one log per process; what the emulator unpacks
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self.aws, self.logs, self.tmp = self.path / "aws", self.path / "logs", self.path / "tmp"
        self.key, self.environment = self.path / "key", self.path / "environment.json"
        self._remembered = self.path / "remembered.json"
        self._lock: int | None = None

    def __enter__(self) -> Self:
        """Make the folder and take its lock, or raise a LocalError that says what stands in the way."""
        try:
            self._prepare()
        except OSError as error:
            self._release()
            raise LocalError(self._sentence(error)) from error
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        """Let go of the lock."""
        self._release()

    def remember(self, **values: Any) -> dict[str, Any]:
        """Everything remembered, with ``values`` added and kept for the next start."""
        try:
            known = json.loads(self._remembered.read_text())
        except (FileNotFoundError, ValueError):
            known = {}
        if values:
            known |= values
            write_private(self._remembered, json.dumps(known))
        return dict(known)

    def _prepare(self) -> None:
        for folder in (self.path, self.aws, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        self.path.chmod(0o700)
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LocalError(
                f"Another Tuneyard is running on the state folder {self.path}. Use that one, stop it, or choose "
                "another folder with --state DIR."
            ) from error
        if shutil.disk_usage(self.path).free < LEAST_FREE_BYTES:
            raise OSError(errno.ENOSPC, "disk full")
        shutil.rmtree(self.tmp, ignore_errors=True)
        self.tmp.mkdir()
        for log in self.logs.glob("*.log"):
            if log.stat().st_size > MOST_LOG_BYTES:
                log.replace(log.with_suffix(".log.old"))
        write_private(self.path / ".gitignore", "*\n")

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _sentence(self, error: OSError) -> str:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            least = LEAST_FREE_BYTES // 1_000_000
            return (
                f"The disk that holds the state folder {self.path} is full. Free at least {least} MB there, or choose "
                "another folder with --state DIR."
            )
        reason = (error.strerror or str(error)).lower()
        return (
            f"The state folder {self.path} cannot be written ({reason}). Make it writable, or choose another folder "
            "with --state DIR."
        )


def write_private(file: Path, text: str) -> None:
    """Write a file that only its owner can read; a reader sees the old text or the new one, never half of it."""
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "w") as stream:
            stream.write(text)
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
