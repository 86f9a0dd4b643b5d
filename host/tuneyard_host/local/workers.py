"""The trainer and the inference service as processes: their name, their lock, their socket, and SIGTERM."""

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
    held = None if lock is None else _hold(lock)
    from tuneyard_host.training import (
        trainer,  # takes seconds, in which SIGTERM may still end the process at once
    )

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        trainer.serve(name=name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}", stop=stop)
    finally:
        if held is not None:
            os.close(held)


def infer(host: str, port: int, fd: int | None) -> None:
    """Serve chat until SIGTERM: on a listening socket that the parent opened, or on a port of this host."""
    import uvicorn

    from tuneyard import blobs, usage
    from tuneyard.settings import settings
    from tuneyard_host.inference.meter import Meter
    from tuneyard_host.inference.service import create_app

    own, ledger = settings(), usage.Ledger()
    meter = Meter(per_key=own.key_concurrency, per_project=own.project_concurrency, book=ledger.book)
    app = create_app(
        own.base_models, blobs.get, own.engine_token, meter=meter, vllm_api_key=own.vllm_api_key
    )
    config = uvicorn.Config(
        app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=3, timeout_keep_alive=75
    )
    uvicorn.Server(config).run(sockets=None if fd is None else [socket.socket(fileno=fd)])
    ledger.close()


def _hold(file: Path) -> int:
    held = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(held)
        told = f"Another trainer holds {file}. Stop it, or give this one another --name and --lock."
        raise LocalError(told) from error
    return held
