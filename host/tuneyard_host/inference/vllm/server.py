"""A base model that a vLLM server answers for, with the interface of the embedded server."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from tuneyard.completions import EngineRequest
from tuneyard.errors import ApiError, ModelNotFound
from tuneyard.settings import BaseModelSpec
from tuneyard_host.inference import options
from tuneyard_host.inference.meter import Meter

from . import wire
from .adapters import Adapters
from .calls import Calls, lines

_COUNTING_SECONDS = 5
News = asyncio.Queue[dict[str, Any] | None]
"""The chunks of a stream and None at its end; without a bound, as a slow reader must not hold vLLM's connection."""


class Server:
    """The door's side of one vLLM server."""

    def __init__(
        self, spec: BaseModelSpec, read_blob: Callable[[str], bytes], meter: Meter, api_key: str
    ) -> None:
        self._calls = Calls(spec.engine_url, api_key)
        self._meter = meter
        self._adapters = Adapters(self._calls, Path(spec.engine_folder), read_blob, spec.engine_adapters)
        self._base: asyncio.Future[str] | None = None
        self._running = 0

    async def begin(self, request: EngineRequest) -> Exchange:
        """Refuse what vLLM would drop in silence, and send the request; a stream has begun when this returns."""
        options.refuse(request.chat, honoured=wire.HONOURED)
        self._meter.begin(request)
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = loop.create_future()
        news: News = asyncio.Queue()
        task = loop.create_task(self._answer(request, opened, news))
        exchange = Exchange(task, news)
        if request.chat.stream:
            both: set[asyncio.Future[Any]] = {task, opened}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not opened.done():
                task.result()
        return exchange

    @property
    def load(self) -> dict[str, int]:
        """How many requests run, and how many adapters vLLM holds for us."""
        return {"running": self._running, "adapters": len(self._adapters)}

    async def close(self) -> None:
        """Hang up; vLLM lives on, with what it has loaded."""
        await self._calls.close()

    async def _answer(
        self, request: EngineRequest, opened: asyncio.Future[None], news: News
    ) -> dict[str, Any] | None:
        """Ask, once more where vLLM has lost the model, and book what was used, however it ends."""
        reading = wire.Reading(request.chat)
        self._running += 1
        try:
            for again in (True, False):
                try:
                    return await self._ask(request, reading, opened, news)
                except ModelNotFound:
                    if opened.done() or not again:
                        raise
                    self._base = None
                    if request.adapter is not None:
                        self._adapters.forget(request.adapter)
            return None
        except asyncio.CancelledError:
            if not request.chat.stream:
                reading.prompt_tokens = await self._prompt_tokens(request)
            raise
        finally:
            self._running -= 1
            self._meter.end(
                request, prompt_tokens=reading.prompt_tokens, completion_tokens=reading.completion_tokens
            )
            news.put_nowait(None)

    async def _ask(
        self,
        request: EngineRequest,
        reading: wire.Reading,
        opened: asyncio.Future[None],
        news: News,
    ) -> dict[str, Any] | None:
        async with self._model(request) as model:
            body = wire.request_body(request.chat, model)
            if not request.chat.stream:
                reply = await self._calls.post("/v1/chat/completions", body)
                if reply.status != 200:
                    raise wire.error(*reply)
                return reading.whole(json.loads(reply.content))
            async with self._calls.stream("/v1/chat/completions", body) as response:
                if response.status != 200:
                    raise wire.error(response.status, await response.read())
                opened.set_result(None)
                async for event in _events(response):
                    if (chunk := reading.chunk(event)) is not None:
                        news.put_nowait(chunk)
        return None

    async def _prompt_tokens(self, request: EngineRequest) -> int:
        """The prompt's tokens of a whole answer that was given up, all that vLLM still tells of it, or 0."""
        try:
            async with asyncio.timeout(_COUNTING_SECONDS), self._model(request) as model:
                reply = await self._calls.post("/tokenize", wire.tokenize_body(request.chat, model))
                return int(json.loads(reply.content)["count"])
        except (ApiError, TimeoutError, ValueError, KeyError):
            return 0

    @asynccontextmanager
    async def _model(self, request: EngineRequest) -> AsyncIterator[str]:
        """The name by which vLLM knows what the request is for."""
        base = await self._base_name()
        if request.adapter is None:
            yield base
            return
        async with self._adapters.held(request.adapter) as name:
            yield name

    async def _base_name(self) -> str:
        """What vLLM calls its base model. Asked once; adapters that it holds from before are ours to unload."""
        if self._base is None:
            self._base = asyncio.ensure_future(self._meet())
        base = self._base
        try:
            return await asyncio.shield(base)
        except ApiError:
            if self._base is base:
                self._base = None
            raise

    async def _meet(self) -> str:
        reply = await self._calls.get("/v1/models")
        if reply.status != 200:
            raise wire.error(*reply)
        cards = json.loads(reply.content)["data"]
        self._adapters.adopt([card["id"] for card in cards if card.get("parent")])
        return str(next(card["id"] for card in cards if not card.get("parent")))


class Exchange:
    """One request on its way through vLLM. Whoever stops reading ends it there too."""

    def __init__(self, task: asyncio.Task[dict[str, Any] | None], news: News) -> None:
        self._task, self._news = task, news
        self.end: Callable[[], object] = weakref.finalize(self, _cancel, asyncio.get_running_loop(), task)
        """Ends the request: called when reading ends, or at the latest when the exchange is dropped."""

    async def whole(self) -> dict[str, Any]:
        """The ``chat.completion``."""
        try:
            answer = await self._task
        finally:
            self.end()
        if answer is None:
            raise ApiError("A stream was asked for, and a whole answer read.")
        return answer

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The ``chat.completion.chunk`` objects, as they come."""
        try:
            while (chunk := await self._news.get()) is not None:
                yield chunk
            await self._task
        finally:
            self.end()


def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
    with suppress(RuntimeError):  # the loop is closed, and the task with it
        loop.call_soon_threadsafe(task.cancel)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The objects of a stream; an error among them is raised."""
    async for line in lines(response):
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        event: dict[str, Any] = json.loads(data)
        if "choices" not in event:
            status = (event.get("error") or event).get("code")
            raise wire.error(status if isinstance(status, int) else 500, data)
        yield event
