"""The emulated AWS: ministack in this process, on the loopback interface, with its state in the state folder."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import shutil
import socket
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from tuneyard_host.local.folder import Folder

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

logger = logging.getLogger("tuneyard.emulator")
SAVE = "/_tuneyard/save"
LEAST_FREE_BYTES = 50_000_000
_READS = ("Get", "Describe", "List", "Query", "Scan", "BatchGet", "Receive", "Head", "Lookup")
_PURE = ("_tokenize", "_condition_syntax_error")
"""What the emulated table computes again for every item of a query: three quarters of what a condition takes."""
_RINGS = ("SendMessage", "SendMessageBatch", "PutEvents")


def environment(folder: Folder, *, port: int) -> dict[str, str]:
    """What ministack reads from its environment."""
    return {
        "BIND_HOST": "127.0.0.1", "MINISTACK_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "LOG_LEVEL": "WARNING",
        "IOT_MTLS_ENABLED": "0", "SFTP_ENABLED": "0", "DOCKER_HOST": "unix:///nonexistent", "TMPDIR": str(folder.tmp),
        "PERSIST_STATE": "1", "STATE_DIR": str(folder.aws / "own"),
        "S3_PERSIST": "1", "S3_DATA_DIR": str(folder.aws / "objects"),
    }  # fmt: skip


def serve(listener: socket.socket, folder: Path) -> None:
    """Serve until SIGTERM, then save everything; needs ``environment`` to be set before the process starts."""
    import uvicorn
    from ministack import app as ministack
    from ministack.services import dynamodb, sqs

    from tuneyard_host.local import snapshots

    for name in _PURE:
        setattr(dynamodb, name, functools.lru_cache(maxsize=4096)(getattr(dynamodb, name)))
    snapshots.tidy(folder)
    snapshots.look_at(folder / "current")
    ministack.save_all = lambda _: None  # at its end it would overwrite the files of ``current`` one by one
    bell = sqs.asyncio = Bell()
    guarded = Guarded(ministack.app, snapshots.Snapshots(folder), bell)
    server = uvicorn.Server(
        uvicorn.Config(
            guarded, log_level="warning", access_log=False, server_header=False, date_header=False, lifespan="on",
            timeout_keep_alive=75, timeout_graceful_shutdown=2,
        )
    )  # fmt: skip
    server.run(sockets=[listener])
    guarded.snapshots.save_at_the_end()


def is_full(folder: Path) -> bool:
    """Whether the emulator takes no more writes, because it could not keep them."""
    return shutil.disk_usage(folder).free < LEAST_FREE_BYTES


class Bell:
    """``asyncio`` for the emulator's queues: a long poll of theirs looks ten times a second, and here when it rings."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        """Wait so long, or until a message was sent."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._rung.wait(), seconds)

    def ring(self) -> None:
        """Have every queue looked at now."""
        self._rung.set()
        self._rung = asyncio.Event()


class Guarded:
    """The emulator, with its snapshots, shut to web pages and shut while it cannot keep what it is told."""

    def __init__(self, app: Any, snapshots: Any, bell: Bell) -> None:
        self.app, self.snapshots, self.bell = app, snapshots, bell
        self._full, self._looked = False, 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            keeper = asyncio.create_task(self.snapshots.keep())
            try:
                await self.app(scope, receive, send)
            finally:
                keeper.cancel()
        elif scope["type"] != "http":
            await self.app(scope, receive, send)
        elif _from_elsewhere(scope):
            await _answer(
                send, 403, "AccessDenied", "The emulator takes requests of this machine's programs alone."
            )
        elif scope["path"] == SAVE:
            await self._save(send)
        elif _reads(scope):
            await self.app(scope, receive, send)
        elif self._cannot_keep():
            await _answer(
                send, 507, "InsufficientStorage", "The disk of the state folder is full or not writable."
            )
        else:
            self.snapshots.changed()
            await self.app(scope, receive, send)
            self.snapshots.changed()
            if _operation(scope) in _RINGS:
                self.bell.ring()

    async def _save(self, send: Send) -> None:
        from tuneyard_host.local.snapshots import NotSaved

        try:
            await self.snapshots.save()
        except NotSaved as error:
            await _answer(send, 503, "NotSaved", str(error))
        else:
            await _answer(send, 200, "Saved", "")

    def _cannot_keep(self) -> bool:
        now = time.monotonic()
        if now > self._looked + 1:
            self._looked = now
            self._full = is_full(self.snapshots.folder)
        return self._full or self.snapshots.failures >= 3


def _reads(scope: Scope) -> bool:
    """Whether a request certainly changes nothing worth a snapshot; a message that was only received comes again."""
    if scope["method"] in ("GET", "HEAD", "OPTIONS"):
        return True
    return _operation(scope).startswith(_READS)


def _operation(scope: Scope) -> str:
    return _header(scope, b"x-amz-target").rpartition(".")[2]


def _from_elsewhere(scope: Scope) -> bool:
    """Whether a web page or a webhook sends this: nobody who knows the address means any other name for it.

    A page that holds a presigned link may use it.
    """
    if not _header(scope, b"host").startswith("127.0.0.1:"):
        return True
    return bool(_header(scope, b"origin")) and b"X-Amz-Signature=" not in scope["query_string"]


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


async def _answer(send: Send, status: int, kind: str, message: str) -> None:
    body = json.dumps({"__type": kind, "message": message}).encode()
    headers = [(b"content-type", b"application/x-amz-json-1.0"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
