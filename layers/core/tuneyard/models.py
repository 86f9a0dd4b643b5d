"""Trainable models: a base model, a name, and the LoRA settings of the checkpoints to come."""

from __future__ import annotations

from boto3.dynamodb.conditions import Attr

from tuneyard import blobs, checkpoints, clock, ids, table
from tuneyard.configs import LoraSettings, RLConfig
from tuneyard.errors import Conflict, Forbidden, Invalid, NotFound
from tuneyard.jobs import cancel_all
from tuneyard.records import REGISTRY_PROJECT, Alias, Checkpoint, Collection, Identity, Label, Model, Run
from tuneyard.settings import BaseModelSpec, settings

SCHEME = "wandb-artifact:///"
"""What a trained model's name may begin with."""


def base_models() -> list[BaseModelSpec]:
    """The base models on offer."""
    return settings().base_models


def base_model(name: str) -> BaseModelSpec:
    """The base model of this id; Invalid, naming the ones there are, when it is not on offer."""
    for spec in base_models():
        if spec.id == name:
            return spec
    there = ", ".join(repr(spec.id) for spec in base_models())
    raise Invalid(f"The base model {name!r} is not on offer here; use one of {there}.", param="base_model")


def create(
    caller: Identity,
    *,
    entity: str | None,
    project: str,
    name: str,
    base_model_id: str,
    return_existing: bool,
    lora: LoraSettings | None,
) -> Model:
    """Make a model with its run and its collection, or return the one of that name.

    The collection row is what makes the name unique, and all three rows are written at once.
    """
    entity = entity or caller.team
    if entity != caller.team:
        raise Forbidden(f"Your key belongs to team {caller.team!r} and cannot make a model for {entity!r}.")
    for field, value in (("project", project), ("name", name)):
        _check_name(field, value)
    if project.startswith(REGISTRY_PROJECT):
        raise Invalid(
            f"Projects whose name begins with {REGISTRY_PROJECT!r} are registries.", param="project"
        )
    base_model(base_model_id)
    now = clock.now_ms()
    model = Model(
        id=ids.new(),
        entity=entity,
        project=project,
        name=name,
        base_model=base_model_id,
        run_id=ids.new(),
        lora=lora or LoraSettings(),
        created_at=now,
        created_by=caller.user,
    )
    run = Run(
        id=model.run_id,
        entity=entity,
        project=project,
        name=name,
        model_id=model.id,
        user=caller.user,
        created_at=now,
    )
    for _ in range(3):
        try:
            table.transact(
                table.Put(_collection(model), new=True),
                table.Put(model, new=True),
                table.Put(run, new=True),
            )
            return model
        except table.ConditionFailed:
            existing = _named(model.collection)
        if existing is not None:
            return _existing(existing, model, return_existing=return_existing, lora=lora)
    raise Conflict(
        f"The name {model.collection!r} belongs to a data set, or to a model that is being deleted just now. "
        "Try again, or use another name.",
        param="name",
    )


def get(caller: Identity, model_id: str) -> Model:
    """The model; NotFound when there is none or it is another team's."""
    model = table.get(Model, model_id)
    if model is None or model.entity != caller.team or model.deleted_at is not None:
        raise NotFound(f"No model {model_id!r}.")
    return model


def named(caller: Identity, collection: str) -> Model | None:
    """The model ``entity/project/name``, or None when there is none or it is another team's."""
    if collection.split("/")[0] != caller.team:
        return None
    return _named(collection)


def pin_reference(caller: Identity, of: Model, config: RLConfig) -> RLConfig:
    """The config with its ``kl_ref_adapter_path`` named by step, so that an alias that moves changes nothing.

    Raises Invalid when that is no checkpoint that the caller may read, or of another base model.
    """
    if (name := config.kl_ref_adapter_path) is None:
        return config
    collection, _, alias = name.removeprefix(SCHEME).partition(":")
    model = named(caller, collection)
    checkpoint = None if model is None else checkpoints.find(model, alias or "latest")
    if model is None or checkpoint is None:
        raise Invalid(
            f"kl_ref_adapter_path {name!r} is no checkpoint of yours. Name one as entity/project/name:step3; paths are "
            "not taken.",
            param="experimental_config.kl_ref_adapter_path",
        )
    if model.base_model != of.base_model:
        raise Invalid(
            f"{name!r} is an adapter of {model.base_model!r}, and this model's base is {of.base_model!r}.",
            param="experimental_config.kl_ref_adapter_path",
        )
    return config.model_copy(update={"kl_ref_adapter_path": f"{collection}:step{checkpoint.step}"})


def page(
    caller: Identity,
    *,
    entity: str | None,
    project: str | None,
    name: str | None,
    after: str | None,
    limit: int,
    descending: bool,
) -> list[Model]:
    """The team's models in order of creation, at most ``limit``."""
    if entity not in (None, caller.team):
        raise Forbidden(f"Your key belongs to team {caller.team!r}, not to {entity!r}.")
    start = None
    if after is not None:
        start = table.get(Model, after)
        if start is None or start.entity != caller.team:
            raise Invalid(
                f"No model has the id {after!r}; send the id of a row of this list as `after`.", param="after"
            )
    wanted = [
        Attr(field).eq(value) for field, value in (("project", project), ("name", name)) if value is not None
    ]
    only = wanted[0] & wanted[1] if len(wanted) == 2 else wanted[0] if wanted else None
    return table.listed(
        Model, "by_team", caller.team, after=start, limit=limit, descending=descending, only=only
    )


def delete(caller: Identity, model_id: str) -> None:
    """Delete a model, its checkpoints, aliases and files, and cancel its jobs first; its jobs stay readable.

    The mark comes first: from then on no job can be made and none can commit. What a crash leaves, the sweep ends.
    """
    while True:
        model = get(caller, model_id)
        unchanged = Attr("last_step").eq(model.last_step) & Attr("deleted_at").not_exists()
        busy = Attr("active_job")
        unchanged &= busy.not_exists() if model.active_job is None else busy.eq(model.active_job)
        gone = model.model_copy(update={"deleted_at": clock.now_ms()})
        try:
            table.transact(
                table.Put(gone, when=unchanged),
                table.Delete(Collection, (model.collection,), when=Attr("id").eq(model.id)),
            )
            break
        except table.ConditionFailed:
            continue
    finish_deletion(gone, by=caller.user)


def finish_deletion(model: Model, *, by: str) -> None:
    """Remove what belongs to a model that is marked as deleted, its row last."""
    cancel_all(model, reason=f"cancelled because the model was deleted by {by}")
    while rows := table.children(Checkpoint, model.id, limit=100):
        for row in rows:
            table.write(table.Delete(Checkpoint, (model.id, row.step)))
    while aliases := table.children(Alias, model.id, limit=100):
        for alias in aliases:
            table.write(table.Delete(Alias, (model.id, alias.alias)))
    while labels := table.children(Label, model.id, limit=100):
        for label in labels:
            table.write(table.Delete(Label, (model.id, label.version, label.kind, label.name)))
    blobs.delete_prefix(blobs.model_prefix(model.id))
    table.write(table.Delete(Model, (model.id,)))


def _collection(model: Model) -> Collection:
    return Collection(
        name=model.collection, id=model.id, created_at=model.created_at, created_by=model.created_by
    )


def _named(collection: str) -> Model | None:
    row = table.get(Collection, collection)
    model = table.get(Model, row.id) if row is not None and row.kind == "model" else None
    return model if model is not None and model.deleted_at is None else None


def _existing(existing: Model, wanted: Model, *, return_existing: bool, lora: LoraSettings | None) -> Model:
    if not return_existing:
        raise Conflict(
            f"There is a model {wanted.collection!r} already. Send return_existing=true to get it, or another name.",
            param="name",
        )
    if existing.base_model != wanted.base_model:
        raise Conflict(
            f"The model {wanted.collection!r} has the base model {existing.base_model!r}, not {wanted.base_model!r}.",
            param="base_model",
        )
    if lora is not None and existing.lora != lora:
        raise Conflict(
            f"The model {wanted.collection!r} has other LoRA settings: {existing.lora}.", param="lora"
        )
    return existing


def _check_name(field: str, value: str) -> None:
    if (
        not 1 <= len(value) <= 128
        or value != value.strip()
        or not value.isprintable()
        or set(value) & set("/:\\")
    ):
        raise Invalid(
            f"{field} {value[:140]!r} cannot be used: send 1 to 128 printable characters without '/', ':' and '\\'.",
            param=field,
        )
