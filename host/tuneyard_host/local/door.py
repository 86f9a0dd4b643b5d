"""The HTTP door: the routers of every function in one process, with real streaming, and the sweep beside them."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio.to_thread
import uvicorn
from fastapi import FastAPI

from tuneyard import web
from tuneyard_host.local import doors

SWEEP_SECONDS = 2.0
THREADS = 200
"""Requests that may wait for the table at the same time."""

logger = logging.getLogger("tuneyard.door")


def serve(listener: socket.socket, *, access_log: Path) -> None:
    """Serve every function's routes on this socket until SIGTERM."""
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
    modules = doors.modules()
    api = web.create_app("Tuneyard", *(m.router for m in modules.values() if hasattr(m, "router")))
    api.router.lifespan_context = _lifespan
    threading.Thread(target=_sweep, args=(modules["sweep"],), daemon=True, name="sweep").start()
    with access_log.open("a", buffering=1) as log:
        config = uvicorn.Config(
            AccessLog(api, log), log_level="warning", access_log=False, server_header=False,
            timeout_graceful_shutdown=3, timeout_keep_alive=75,
        )  # fmt: skip
        uvicorn.Server(config).run(sockets=[listener])


@asynccontextmanager
async def _lifespan(_: FastAPI) -> AsyncIterator[None]:
    anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS
    yield


def _sweep(module: ModuleType) -> None:
    """Sweep every two seconds: the rule of the template does it once a minute, which is long on a laptop."""
    while True:
        try:
            module.handler({}, None)
        except Exception:
            logger.exception("sweep failed")
        time.sleep(SWEEP_SECONDS)


class AccessLog:
    """Middleware that writes one line for each request."""

    def __init__(self, app: Any, log: Any) -> None:
        self.app, self.log = app, log

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the request on, and write its line when its answer is complete."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0

        async def watched(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            took = (time.perf_counter() - began) * 1000
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            self.log.write(f"{when} {scope['method']} {scope['path']} {status} {took:.0f}ms\n")
