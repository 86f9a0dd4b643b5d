"""What a chat's model name stands for: a base model, as it is or with the adapter of a checkpoint.

A name is looked up in up to four reads, one after the other. What they found is remembered, and the next time all of
it is read at once and compared: one read for a chat, and nothing stale. A checkpoint answers from the moment that it
exists, and a deleted one, or another model under the name, is noticed at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from typing import Any, NamedTuple

from starlette.concurrency import run_in_threadpool

from tuneyard import checkpoints, models, table
from tuneyard.completions import AdapterRef
from tuneyard.errors import ModelNotFound
from tuneyard.records import Alias, Checkpoint, Collection, Identity, Model, Record

_REMEMBERED = 10_000


class Target(NamedTuple):
    """What answers; ``trained`` when it was named as a trained model."""

    base_model: str
    adapter: AdapterRef | None
    trained: bool


class _Found(NamedTuple):
    """What a name stood for when it was last looked up; no checkpoint: the model as it was before its first."""

    model: Model
    checkpoint: Checkpoint | None


_found: OrderedDict[str, _Found] = OrderedDict()
_lock = threading.Lock()
_Asked = tuple[asyncio.AbstractEventLoop, str, str]
"""Who asks, by team, for which name."""
_Read = asyncio.Task[Target]
_coming: dict[_Asked, _Read] = {}
_running: dict[_Asked, _Read] = {}


async def resolve(caller: Identity, name: str) -> Target:
    """What a model name stands for: a base model's id, or ``entity/project/name`` with ``:stepN`` or another alias.

    A crowd that names one model shares its reads: each chat waits for one that began after it came.
    """
    if any(spec.id == name for spec in models.base_models()):
        return Target(name, None, trained=False)
    asked = asyncio.get_running_loop(), caller.team, name
    read = _coming.get(asked)
    if read is None:
        read = _coming[asked] = asyncio.create_task(_read(asked, caller, _running.get(asked)))
        read.add_done_callback(lambda read: read.cancelled() or read.exception())
    return await asyncio.shield(read)


async def _read(asked: _Asked, caller: Identity, before: _Read | None) -> Target:
    if before is not None:
        await asyncio.wait([before])
    read = _running[asked] = _coming.pop(asked)
    try:
        return await run_in_threadpool(_target, caller, asked[2])
    finally:
        if _running[asked] is read:
            del _running[asked]


def _target(caller: Identity, name: str) -> Target:
    collection, _, alias = name.removeprefix(models.SCHEME).partition(":")
    alias = alias or "latest"
    if collection.count("/") != 2 or collection.split("/")[0] != caller.team:
        raise _unknown(name)
    found = _confirmed(collection, alias) or _looked_up(caller, collection, alias)
    if found is None:
        raise _unknown(name)
    if found.checkpoint is None and alias not in ("latest", "step0"):
        raise ModelNotFound(f"The model {collection!r} has no checkpoint {alias!r}.", param="model")
    _remember(f"{collection}:{alias}", found)
    adapter = None
    if found.checkpoint is not None:
        adapter = AdapterRef(checkpoint_id=found.checkpoint.id, prefix=found.checkpoint.prefix)
    return Target(found.model.base_model, adapter, trained=True)


def _looked_up(caller: Identity, collection: str, alias: str) -> _Found | None:
    model = models.named(caller, collection)
    if model is None:
        return None
    return _Found(model, None if alias == "step0" else checkpoints.find(model, alias))


def _confirmed(collection: str, alias: str) -> _Found | None:
    """What was found before, if that is what looking it up again would find; by one read."""
    before = _found.get(f"{collection}:{alias}")
    if before is None:
        return None
    id, step = before.model.id, 0 if before.checkpoint is None else before.checkpoint.step
    wanted: list[tuple[type[Record], tuple[Any, ...]]]
    wanted = [(Collection, (collection,)), (Model, (id,)), (Checkpoint, (id, step))]
    if not checkpoints.computed(alias):
        wanted.append((Alias, (id, alias)))
    there, model, checkpoint, *pointers = table.get_many(*wanted)
    if not (isinstance(there, Collection) and isinstance(model, Model)) or checkpoint != before.checkpoint:
        return None
    if any(not isinstance(row, Alias) or row.version != step for row in pointers):
        return None
    newest = alias != "latest" or model.last_step == before.model.last_step  # no step is used twice
    return before if newest and there.id == id and model.deleted_at is None else None


def _remember(name: str, found: _Found) -> None:
    with _lock:
        _found[name] = found
        _found.move_to_end(name)
        if len(_found) > _REMEMBERED:
            _found.popitem(last=False)


def _unknown(name: str) -> ModelNotFound:
    return ModelNotFound(
        f"The model {name!r} does not exist. GET /v1/models lists those you can use.", param="model"
    )
