"""The trainer and the inference service as processes: their name, their lock, their socket, and SIGTERM."""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import socket
import sys
import threading
from pathlib import Path

from tuneyard_host.local.folder import LocalError


def train(name: str | None, lock: Path | None, *, shard: bool = False) -> None:
    """Work on jobs until SIGTERM or Ctrl-C; the job at hand is given back."""
    first = os.environ.get("RANK", "0") == "0"
    held = _hold(lock) if lock is not None and first else None
    from tuneyard_host.training import (  # takes seconds, in which SIGTERM may still end the process at once
        memory,
        trainer,
        world,
    )

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    memory.keep_freed()
    world.join()
    name = name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    try:
        trainer.serve(name=name, stop=stop, shard=shard)
        world.leave()
    finally:
        if held is not None:
            os.close(held)


def train_together(processes: int, arguments: list[str]) -> None:
    """Become torchrun, with so many processes that train each job together."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    os.execv(sys.executable, [*run, "-m", "tuneyard_host.cli", "trainer", *arguments])  # noqa: S606


def infer(host: str, port: int, fd: int | None) -> None:
    """Serve chat until SIGTERM: on a listening socket that the parent opened, or on a port of this host."""
    import uvicorn

    from tuneyard import blobs, usage
    from tuneyard.settings import settings
    from tuneyard_host.inference.meter import Meter
    from tuneyard_host.inference.service import create_app
    from tuneyard_host.training import planning

    own, ledger = settings(), usage.Ledger()
    meter = Meter(per_key=own.key_concurrency, per_project=own.project_concurrency, book=ledger.book)
    app = create_app(own.base_models, blobs.get, own.engine_token, meter=meter, vllm_api_key=own.vllm_api_key)
    app.include_router(planning.router)
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
