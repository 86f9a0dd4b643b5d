"""A trainer as a process: its name, its lock, and how SIGTERM reaches it."""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import socket
import threading
from pathlib import Path

from tuneyard_host.local.folder import LocalError


def train(name: str | None, lock: Path | None) -> None:
    """Work on jobs until SIGTERM or Ctrl-C; the job at hand is given back."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    held = None if lock is None else _hold(lock)
    from tuneyard_host.training import trainer

    try:
        trainer.serve(name=name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}", stop=stop)
    finally:
        if held is not None:
            os.close(held)


def _hold(file: Path) -> int:
    held = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(held)
        raise LocalError(f"Another trainer holds {file}. Stop it, or give this one another --name and --lock.") from error
    return held
