"""Checkpoints: the adapters that jobs made. The newest one is the model's ``latest``; step 0 is its base model."""

from __future__ import annotations

import re
from typing import Any

from boto3.dynamodb.conditions import Attr

from tuneyard import blobs, ids, table
from tuneyard.records import Alias, Checkpoint, Model

_STEP = re.compile(r"step(\d{1,9})")


def page(model: Model, *, after: str | None, limit: int, descending: bool) -> list[Checkpoint]:
    """The model's checkpoints by step, at most ``limit``; a checkpoint deleted since still marks a place."""
    start = None if after is None else (ids.position(model.id, after),)
    return table.children(Checkpoint, model.id, after=start, limit=limit, descending=descending)


def latest(model: Model) -> Checkpoint | None:
    """The newest checkpoint that is there, or None: then the model answers as its base model."""
    return next(iter(table.children(Checkpoint, model.id, limit=1, descending=True)), None)


def get(model: Model, step: int) -> Checkpoint | None:
    """The checkpoint of this step, or None."""
    return table.get(Checkpoint, model.id, step)


def find(model: Model, alias: str) -> Checkpoint | None:
    """The checkpoint that ``latest``, ``step{N}`` or an alias of the collection names, or None."""
    if alias == "latest":
        return latest(model)
    if step := _STEP.fullmatch(alias):
        return get(model, int(step[1]))
    row = table.get(Alias, model.id, alias)
    return None if row is None else get(model, row.version)


def computed(alias: str) -> bool:
    """Whether an alias follows from the checkpoints that there are; the others are set by users."""
    return alias == "latest" or _STEP.fullmatch(alias) is not None


def aliases(checkpoint: Checkpoint, newest: Checkpoint | None) -> list[str]:
    """The names of a checkpoint that follow from its place; nothing needs to be moved when one is deleted."""
    at_top = newest is not None and newest.step == checkpoint.step
    return [f"step{checkpoint.step}", *(["latest"] if at_top else [])]


def metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint's metadata as an artifact version: where it comes from, and its metrics by their names."""
    own = {"step": checkpoint.step, "job_id": checkpoint.job_id, "kind": checkpoint.kind.value}
    return checkpoint.metrics | own


def delete(model: Model, steps: list[int]) -> tuple[int, list[int]]:
    """Delete these steps; how many there were, and the steps that were not there."""
    deleted, missing = 0, []
    for step in dict.fromkeys(steps):
        checkpoint = get(model, step) if 0 <= step < 10**10 else None
        try:
            if checkpoint is None:
                raise table.ConditionFailed([0])
            table.write(table.Delete(Checkpoint, (model.id, step), when=Attr("id").eq(checkpoint.id)))
        except table.ConditionFailed:
            missing.append(step)
            continue
        deleted += 1
        blobs.delete_prefix(checkpoint.prefix)
    return deleted, missing
