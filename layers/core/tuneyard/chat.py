"""Chat: the model's name becomes a base model and an adapter, and the inference service answers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from functools import lru_cache
from typing import Any, NamedTuple

import httpx
from pydantic_core import PydanticSerializationError
from starlette.concurrency import run_in_threadpool

from tuneyard import checkpoints, models
from tuneyard.completions import AdapterRef, ChatRequest, EngineRequest
from tuneyard.errors import Forbidden, Invalid, ModelNotFound, Unavailable
from tuneyard.records import Identity, Model
from tuneyard.settings import settings

_TIMEOUT = httpx.Timeout(600, connect=5)


class Target(NamedTuple):
    """What answers: a base model, as it is or with an adapter; ``trained`` when it was named as a trained model."""

    base_model: str
    adapter: AdapterRef | None
    trained: bool


class Answer(NamedTuple):
    """The inference service's answer, passed on as it comes."""

    status: int
    media_type: str
    body: AsyncIterator[bytes]
    headers: dict[str, str]


def resolve(caller: Identity, name: str) -> Target:
    """What a model name stands for: a base model's id, or ``entity/project/name`` with ``:stepN`` or another alias.

    The newest checkpoint is looked up each time, so a checkpoint answers from the moment that it exists.
    """
    if any(spec.id == name for spec in models.base_models()):
        return Target(name, None, trained=False)
    collection, _, alias = name.removeprefix(models.SCHEME).partition(":")
    model = models.named(caller, collection) if collection.count("/") == 2 else None
    if model is None:
        raise ModelNotFound(
            f"The model {name!r} does not exist. GET /v1/models lists those you can use.", param="model"
        )
    if alias == "step0":
        return Target(model.base_model, None, trained=True)
    checkpoint = checkpoints.find(model, alias or "latest")
    if checkpoint is None and alias not in ("", "latest"):
        raise ModelNotFound(f"The model {collection!r} has no checkpoint {alias!r}.", param="model")
    adapter = (
        None if checkpoint is None else AdapterRef(checkpoint_id=checkpoint.id, prefix=checkpoint.prefix)
    )
    return Target(model.base_model, adapter, trained=True)


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
    target = await run_in_threadpool(resolve, caller, request.model)
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
    if not settings().inference_engine_url:
        raise Unavailable("No inference service is configured: set InferenceEngineUrl.", retry_after=30)
    client = _client(asyncio.get_running_loop())
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {settings().engine_token}"}
    url = f"{settings().inference_engine_url}/v1/chat/completions"
    try:
        response = await client.send(
            client.build_request("POST", url, content=body, headers=headers), stream=True
        )
    except httpx.TransportError as error:
        raise Unavailable(
            "The inference service does not answer. Try again in a moment.", retry_after=2
        ) from error
    passed = {name: response.headers[name] for name in ("retry-after",) if name in response.headers}
    return Answer(
        response.status_code,
        response.headers.get("content-type", "application/json"),
        _body_of(response),
        passed,
    )


async def _body_of(response: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for chunk in response.aiter_raw():
            yield chunk
    finally:
        await response.aclose()


@lru_cache(maxsize=4)
def _client(_loop: asyncio.AbstractEventLoop) -> httpx.AsyncClient:
    """One connection pool for each event loop."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=200)
    return httpx.AsyncClient(timeout=_TIMEOUT, limits=limits, trust_env=False)


def _trained_entry(model: Model) -> dict[str, Any]:
    return _entry(
        f"{models.SCHEME}{model.collection}", model.entity, model.base_model, model.created_at // 1000
    )


def _entry(name: str, owner: str, root: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": owner, "root": root}
