"""The inference service: an HTTP door of its own process, called by the chat door with names already resolved.

It listens before torch is imported; requests wait for their base model to be in memory.
"""

from __future__ import annotations

import asyncio
import gc
import hmac
import json
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from aws_lambda_powertools import Logger
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import ValidationError
from starlette.routing import Route

from tuneyard.completions import EngineRequest
from tuneyard.errors import ApiError, Invalid, ModelNotFound, TrainingError, Unauthorized, Unavailable
from tuneyard.settings import BaseModelSpec
from tuneyard.web import error_body, show_error, while_connected

from .meter import Meter

if TYPE_CHECKING:
    from .engine import Limits
    from .server import Server as Embedded
    from .vllm.server import Server as Vllm

    Server = Embedded | Vllm

logger = Logger(service="tuneyard-inference")


class Servers:
    """The server of each base model, started once, off the event loop."""

    def __init__(
        self,
        specs: list[BaseModelSpec],
        read_blob: Callable[[str], bytes],
        limits: Limits | None,
        meter: Meter,
        vllm_api_key: str,
    ) -> None:
        self._meter, self._vllm_api_key = meter, vllm_api_key
        self.specs = {spec.id: spec for spec in specs}
        self._read_blob, self._limits = read_blob, limits
        self._starts: dict[str, Future[Server]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="start")
        self.threads: int | None = None
        """How many threads torch may use, set when the process is ours: half the cores, for the trainer wants some."""

    def start(self, base_model: str) -> Future[Server]:
        """Begin to load a base model, unless that was begun before; one that failed is tried again."""
        start = self._starts.get(base_model)
        if start is None or (start.done() and start.exception() is not None):
            start = self._starts[base_model] = self._pool.submit(self._serve, self.specs[base_model])
        return start

    async def get(self, base_model: str) -> Server:
        """The server of a base model, when it is ready."""
        if base_model not in self.specs:
            raise ModelNotFound(
                f"No base model {base_model!r} is served here; there are {', '.join(self.specs)}."
            )
        try:
            return await asyncio.shield(asyncio.wrap_future(self.start(base_model)))
        except TrainingError as error:
            raise Unavailable(str(error), retry_after=60) from error

    def _serve(self, spec: BaseModelSpec) -> Server:
        if spec.engine_url:
            from .vllm.server import Server as Vllm

            return Vllm(spec, self._read_blob, self._meter, self._vllm_api_key)
        import torch

        from .server import Server

        if self.threads is not None and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(self.threads)
        try:
            server = Server(spec, self._read_blob, self._limits, self._meter)
        except TrainingError as error:
            logger.error("base model not served", base_model=spec.id, reason=str(error))
            raise
        if self.threads is not None:
            gc.freeze()  # 400,000 objects of the libraries, which every full collection would look through: 0.2 s
        return server

    def ready(self) -> dict[str, Server]:
        """Those that can answer now."""
        done = {
            name: start for name, start in self._starts.items() if start.done() and start.exception() is None
        }
        return {name: start.result() for name, start in done.items()}

    async def close(self) -> None:
        """End every engine; requests that still run hear Unavailable."""
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)
        for server in self.ready().values():
            await server.close()


def create_app(
    bases: list[BaseModelSpec],
    read_blob: Callable[[str], bytes],
    engine_token: str = "",
    limits: Limits | None = None,
    meter: Meter | None = None,
    vllm_api_key: str = "",
) -> FastAPI:
    """The service for these base models; adapters are read with ``read_blob(key)``."""
    servers = Servers(bases, read_blob, limits, meter or Meter(per_key=2000, per_project=6000), vllm_api_key)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        servers.threads = max(1, (os.cpu_count() or 1) // 2)
        for name in servers.specs:
            servers.start(name)
        yield
        await servers.close()

    async def chat_completions(request: Request) -> Response:
        """One chat, whole or as server-sent events."""
        authorised(request)
        body = _asked(await request.body())
        server = await servers.get(body.base_model)
        work = await server.begin(body)
        if body.chat.stream:
            return StreamingResponse(_events(work.chunks()), media_type="text/event-stream")
        return JSONResponse(await while_connected(request, work.whole()))

    # Not a route of FastAPI's, whose own work was a third of the event loop's time in a crowd.
    chat = Route("/v1/chat/completions", chat_completions, methods=["POST"])
    app = FastAPI(title="Tuneyard inference", lifespan=lifespan, routes=[chat])
    app.state.servers, app.state.engine_token = servers, engine_token
    app.add_exception_handler(ApiError, _show_api_error)  # type: ignore[arg-type]
    app.add_exception_handler(RequestValidationError, _show_invalid_request)  # type: ignore[arg-type]
    app.add_exception_handler(Exception, _show_bug)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Alive; which base models there are, and how busy those are that answer already."""
        busy = {name: server.load for name, server in servers.ready().items()}
        return {"status": "ok", "base_models": list(servers.specs), "engines": busy}

    return app


def authorised(request: Request) -> None:
    """Refuse whoever does not bring the token that the service shares with its chat door."""
    token = request.app.state.engine_token
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if token and not hmac.compare_digest(given.encode(), token.encode()):
        raise Unauthorized("This service answers its own chat door only.")


def _asked(body: bytes) -> EngineRequest:
    try:
        return EngineRequest.model_validate_json(body)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error


async def _events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Server-sent events; an error in the middle is one more event, since the status is long sent."""
    try:
        async for chunk in chunks:
            yield _event(chunk)
    except ApiError as error:
        yield _event({"error": error_body(error)["error"]})
    yield b"data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _show_api_error(_: Request, error: ApiError) -> JSONResponse:
    return show_error(error)


async def _show_invalid_request(_: Request, error: RequestValidationError) -> JSONResponse:
    found = [{"loc": list(e["loc"]), "msg": e["msg"], "type": e["type"]} for e in error.errors()]
    path = ".".join(str(part) for part in found[0]["loc"] if part not in ("body", "chat"))
    return show_error(Invalid(f"{path or 'body'}: {found[0]['msg']}", param=path or None), found)


async def _show_bug(request: Request, error: Exception) -> JSONResponse:
    logger.error("request failed", exc_info=error, path=request.url.path)
    return show_error(ApiError("Something went wrong on our side; it was logged. Try again, or report it."))
