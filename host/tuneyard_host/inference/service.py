"""The inference service: an HTTP door of its own process, called by the chat door with names already resolved.

It listens before torch is imported; requests wait for their base model to be in memory.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

from aws_lambda_powertools import Logger
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse

import tuneyard
from tuneyard.completions import EngineRequest
from tuneyard.errors import ApiError, Invalid, ModelNotFound, Unauthorized, Unavailable
from tuneyard.settings import BaseModelSpec, settings
from tuneyard.web import show_error

if TYPE_CHECKING:
    from .server import Server

logger = Logger(service="tuneyard-inference")


class Servers:
    """One server per base model, started once in the background."""

    def __init__(self, bases: list[BaseModelSpec], read_blob: Callable[[str], bytes]) -> None:
        self._specs = {spec.id: spec for spec in bases}
        self._read_blob = read_blob
        self._starts: dict[str, asyncio.Task[Server]] = {}
        self._ready: dict[str, Server] = {}

    @property
    def names(self) -> list[str]:
        return list(self._specs)

    async def get(self, base_model: str) -> Server:
        """The server of a base model, when it is ready."""
        if base_model not in self._specs:
            raise ModelNotFound(f"No base model {base_model!r} is served here; there are {', '.join(self._specs)}.")
        if base_model not in self._ready:
            start = self._starts.get(base_model)
            if start is None:
                start = self._starts[base_model] = asyncio.create_task(self._start(self._specs[base_model]))
            await asyncio.shield(start)
        return self._ready[base_model]

    async def _start(self, spec: BaseModelSpec) -> None:
        try:
            self._ready[spec.id] = await asyncio.to_thread(_serve, spec, self._read_blob)
        except tuneyard.errors.TrainingError as error:
            logger.error("base model not served", base_model=spec.id, exc_info=error)
            raise Unavailable(str(error), retry_after=60) from error
        finally:
            del self._starts[spec.id]

    def load(self) -> dict[str, dict[str, int]]:
        """How busy each engine is."""
        return {name: server.engine.load for name, server in self._ready.items()}

    async def close(self) -> None:
        for server in self._ready.values():
            await asyncio.to_thread(server.engine.close)


def _serve(spec: BaseModelSpec, read_blob: Callable[[str], bytes]) -> Server:
    from .server import Server

    return Server(spec, read_blob)
