"""Models, their checkpoints, and what is logged on them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from mangum import Mangum
from pydantic import BaseModel, ConfigDict, Field

from tuneyard import checkpoints, models, runs, views, web
from tuneyard.auth import Caller
from tuneyard.configs import LoraSettings
from tuneyard.errors import NotFound
from tuneyard.trajectories import TrajectoryGroup

router = APIRouter(prefix="/v1/preview", tags=["Models"])


class CreateModel(BaseModel):
    """A model to make."""

    model_config = ConfigDict(extra="forbid")

    entity: str | None = None
    project: str
    name: str
    base_model: str
    return_existing: bool | None = None
    lora: LoraSettings | None = None


class Steps(BaseModel):
    """Checkpoints to delete."""

    model_config = ConfigDict(extra="forbid")

    steps: list[int] = Field(max_length=1000)


class Log(BaseModel):
    """Trajectories to keep and to summarise in the model's run."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model_id: str | None = None
    split: str = Field(min_length=1, max_length=128)
    trajectory_groups: list[TrajectoryGroup]


@router.get("/base-models")
def list_base_models() -> list[str]:
    """The ids of the base models on offer."""
    return [spec.id for spec in models.base_models()]


@router.post("/models")
def create_model(body: CreateModel, caller: Caller) -> dict[str, Any]:
    """Make a trainable model, or return the one of that name."""
    model = models.create(
        caller,
        entity=body.entity,
        project=body.project,
        name=body.name,
        base_model_id=body.base_model,
        return_existing=bool(body.return_existing),
        lora=body.lora,
    )
    return views.model(model)


@router.get("/models")
def list_models(
    caller: Caller,
    entity: str | None = None,
    project: str | None = None,
    name: str | None = None,
    after: web.After = None,
    limit: web.Limit = 20,
    order: web.Order = "asc",
) -> dict[str, Any]:
    """The team's models."""
    rows = models.page(
        caller,
        entity=entity,
        project=project,
        name=name,
        after=after,
        limit=limit + 1,
        descending=order == "desc",
    )
    return web.page(rows, limit, views.model)


@router.get("/models/{model_id}")
def get_model(model_id: str, caller: Caller) -> dict[str, Any]:
    """One model."""
    return views.model(models.get(caller, model_id))


@router.delete("/models/{model_id}")
def delete_model(model_id: str, caller: Caller) -> dict[str, Any]:
    """Delete a model with its checkpoints and files; its jobs are cancelled first and stay readable."""
    models.delete(caller, model_id)
    return {"id": model_id, "object": "model", "deleted": True}


@router.get("/models/{model_id}/checkpoints")
def list_checkpoints(
    model_id: str, caller: Caller, after: web.After = None, limit: web.Limit = 20, order: web.Order = "asc"
) -> dict[str, Any]:
    """The model's checkpoints by step."""
    model = models.get(caller, model_id)
    rows = checkpoints.page(model, after=after, limit=limit + 1, descending=order == "desc")
    newest = checkpoints.latest(model)
    return web.page(rows, limit, lambda row: views.checkpoint(model, row, newest))


@router.delete("/models/{model_id}/checkpoints")
def delete_checkpoints(model_id: str, body: Steps, caller: Caller) -> dict[str, Any]:
    """Delete checkpoints by step."""
    deleted, missing = checkpoints.delete(models.get(caller, model_id), body.steps)
    return {"deleted_count": deleted, "not_found_steps": missing}


@router.get("/models/{model_id}/checkpoints/{step}")
def get_checkpoint(model_id: str, step: int, caller: Caller) -> dict[str, Any]:
    """One checkpoint with its lineage and presigned addresses of its files."""
    model = models.get(caller, model_id)
    checkpoint = checkpoints.get(model, step)
    if checkpoint is None:
        raise NotFound(f"The model {model.collection!r} has no checkpoint of step {step}.")
    return views.checkpoint_with_files(model, checkpoint, checkpoints.latest(model))


@router.post("/models/{model_id}/log")
def log(model_id: str, body: Log, caller: Caller) -> dict[str, Any]:
    """Keep trajectories, and append their summary to the model's run."""
    model = models.get(caller, model_id)
    runs.log(model, split=body.split, groups=body.trajectory_groups, author=caller.user)
    return {}


handler = Mangum(web.create_app("Models", router), lifespan="off")
