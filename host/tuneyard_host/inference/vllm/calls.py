"""HTTP to a vLLM server. One that does not answer is Unavailable, whenever it stops to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple

import aiohttp

from tuneyard.errors import Unavailable

_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=600)
_IDLE_SECONDS = 4
"""vLLM hangs up on who is silent for five."""


class Reply(NamedTuple):
    """A whole answer."""

    status: int
    content: bytes


class Calls:
    """The connections to one server: as many as there are requests, at the same cost for each."""

    def __init__(self, url: str, api_key: str) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str) -> Reply:
        """A GET, read to its end."""
        with _answering():
            async with self._open().get(self._url + path) as response:
                return Reply(response.status, await response.read())

    async def post(self, path: str, body: dict[str, Any]) -> Reply:
        """A POST of JSON, read to its end."""
        async with self.stream(path, body) as response:
            return Reply(response.status, await response.read())

    @asynccontextmanager
    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        """A POST of JSON; leaving the block before the answer's end hangs up."""
        with _answering():
            async with self._open().post(self._url + path, json=body) as response:
                yield response

    async def close(self) -> None:
        """Hang up."""
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        """Made by the first call, as it belongs to the event loop."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS)
            self._session = aiohttp.ClientSession(
                connector=connector, headers=self._headers, timeout=_TIMEOUT
            )
        return self._session


async def lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The lines of an answer as they come, however long they are."""
    held = b""
    async for chunk in response.content.iter_any():
        *whole, held = (held + chunk).split(b"\n")
        for line in whole:
            yield line
    if held:
        yield held


@contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Unavailable("The vLLM server does not answer.", retry_after=5) from error
