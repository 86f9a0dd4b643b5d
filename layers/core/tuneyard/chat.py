"""Chat: the model's name becomes a base model and an adapter, and the inference service answers."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, NamedTuple

import aiohttp
from pydantic_core import PydanticSerializationError

from tuneyard import engine, models, targets
from tuneyard.completions import ChatRequest, EngineRequest
from tuneyard.errors import Forbidden, Invalid
from tuneyard.records import Identity, Model

_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=600)
_IDLE_SECONDS = 60
"""For how long a connection waits for the next request; the service waits longer, so that it is never the first."""
_Sessions = dict[
    asyncio.AbstractEventLoop, tuple[AsyncGenerator[aiohttp.ClientSession], aiohttp.ClientSession]
]
_sessions: _Sessions = {}


class Answer(NamedTuple):
    """The inference service's answer, passed on as it comes."""

    status: int
    media_type: str
    body: AsyncIterator[bytes]
    headers: dict[str, str]


def listing(caller: Identity) -> list[dict[str, Any]]:
    """The base models and the caller's trained models, as the model listing shows them."""
    bases = [_entry(spec.id, spec.id.split("/")[0], spec.id, 0) for spec in models.base_models()]
    trained, after = [], None
    while rows := models.page(
        caller, entity=None, project=None, name=None, after=after, limit=1000, descending=False
    ):
        trained += [_trained_entry(model) for model in rows]
        after = rows[-1].id
    return bases + trained


async def complete(caller: Identity, request: ChatRequest, *, project: str | None) -> Answer:
    """Answer a chat on the model that it names. Errors of the inference service travel on as they are.

    A trained model's tokens and their log probabilities come without being asked for: a rollout without them
    cannot be trained on.
    """
    team, project = usage_project(caller, project)
    target = await targets.resolve(caller, request.model)
    if target.trained:
        request = request.model_copy(update=_rollout_defaults(request))
    asked = EngineRequest(
        chat=request,
        base_model=target.base_model,
        adapter=target.adapter,
        team=team,
        project=project,
        key_id=caller.key_id,
    )
    return await _ask(_written(asked))


def usage_project(caller: Identity, header: str | None) -> tuple[str, str]:
    """The team and project that a request is booked on: ``<team>/<project>``, or the key's team and ``inference``."""
    if not header:
        return caller.team, "inference"
    team, slash, project = header.partition("/")
    if not slash:
        team, project = caller.team, header
    if team != caller.team:
        raise Forbidden(f"Your key belongs to team {caller.team!r} and cannot book usage on {team!r}.")
    if not project or "/" in project or not project.isprintable() or len(project) > 128:
        raise Invalid("The project header must read <team>/<project>.", param="Compat-Project")
    return team, project


def _rollout_defaults(request: ChatRequest) -> dict[str, bool]:
    defaults: dict[str, bool] = {}
    if request.logprobs is None:
        defaults["logprobs"] = True
        if request.return_tokens_as_token_ids is None:
            defaults["return_tokens_as_token_ids"] = True
    if request.return_token_ids is None:
        defaults["return_token_ids"] = True
    return defaults


def _written(asked: EngineRequest) -> str:
    """The request as JSON; Invalid for half a character (a lone surrogate), which JSON can name and UTF-8 cannot."""
    try:
        return asked.model_dump_json()
    except PydanticSerializationError as error:
        for name, value in asked.chat.model_dump().items():
            if re.search("[\ud800-\udfff]", json.dumps(value, ensure_ascii=False)):
                raise Invalid(f"{name} holds half a character (a lone surrogate).", param=name) from error
        raise


async def _ask(body: str) -> Answer:
    url, headers = engine.operation("/v1/chat/completions")
    session = await _session()
    try:
        response = await session.post(url, data=io.BytesIO(body.encode()), headers=headers)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise engine.silent() from error
    passed = {name: response.headers[name] for name in ("retry-after",) if name in response.headers}
    media_type = response.headers.get("content-type", "application/json")
    return Answer(response.status, media_type, _body_of(response), passed)


async def _body_of(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The body as it comes; whoever stops reading hangs up."""
    async with response:
        async for chunk in response.content.iter_any():
            yield chunk


async def _session() -> aiohttp.ClientSession:
    """The connections of this event loop; they are closed when it ends."""
    loop = asyncio.get_running_loop()
    if loop not in _sessions:
        opened = _opened(loop)
        _sessions[loop] = opened, await anext(opened)
    return _sessions[loop][1]


async def _opened(loop: asyncio.AbstractEventLoop) -> AsyncGenerator[aiohttp.ClientSession]:
    # aiohttp, as a request costs the same in any crowd: httpx looks at all its connections for each of them.
    # A loop that ends closes its generators, and with this one the connections.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_SECONDS)
    try:
        async with aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT) as session:
            yield session
    finally:
        del _sessions[loop]


def _trained_entry(model: Model) -> dict[str, Any]:
    return _entry(
        f"{models.SCHEME}{model.collection}", model.entity, model.base_model, model.created_at // 1000
    )


def _entry(name: str, owner: str, root: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": owner, "root": root}
