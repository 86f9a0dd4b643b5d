"""Artifacts and registries: collections, versions, aliases, tags and links; and the metrics of runs."""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from mangum import Mangum
from pydantic import BaseModel, ConfigDict, Field

from tuneyard import artifact_views as views
from tuneyard import artifacts, jobs, labels, runs, web
from tuneyard import registry as registries
from tuneyard.auth import Caller
from tuneyard.records import REGISTRY_PROJECT, Collection, Run, Version
from tuneyard.trajectories import Number

router = APIRouter(prefix="/v1", tags=["Artifacts"])
MetricName = Annotated[str, Field(min_length=1, max_length=256)]


class Body(BaseModel):
    """Management bodies refuse what they do not know."""

    model_config = ConfigDict(extra="forbid")


class CreateRegistry(Body):
    """A registry to make."""

    name: str


class CreateVersion(Body):
    """A version of a data set: its files by name, each an upload."""

    files: dict[str, str] | None = None
    metadata: dict[str, Any] | None = None


class Link(Body):
    """Where a version is to be linked."""

    registry: str
    collection: str


class Metrics(Body):
    """A row for a run's history."""

    metrics: dict[MetricName, Number] = Field(min_length=1, max_length=500)


def in_project(entity: str, project: str, name: str, caller: Caller) -> Collection:
    """The collection that a path names in a project."""
    return artifacts.collection(caller, entity, project, name)


def in_registry(registry: str, name: str, caller: Caller) -> Collection:
    """The collection that a path names in a registry."""
    return artifacts.collection(caller, caller.team, REGISTRY_PROJECT + registry, name)


def run_of(entity: str, project: str, run: str, caller: Caller) -> Run:
    """The run that a path names."""
    return runs.find(caller, entity, project, run)


RunOf = Annotated[Run, Depends(run_of)]


def add_routes(place: str, located: Callable[..., Collection]) -> None:
    """The routes of a collection, which are the same in projects and registries."""
    prefix = place + "/collections/{name}"
    in_place = Annotated[Collection, Depends(located)]

    def one_version(of: in_place, version: str) -> tuple[Collection, Version]:
        return of, artifacts.version(of, version)

    one = Annotated[tuple[Collection, Version], Depends(one_version)]

    @router.get(prefix)
    def get_collection(of: in_place) -> dict[str, Any]:
        """One collection."""
        return views.collection(of)

    @router.get(prefix + "/versions")
    def list_versions(
        of: in_place, after: web.After = None, limit: web.Limit = 20, order: web.Order = "asc"
    ) -> dict[str, Any]:
        """The versions of a collection, with aliases, tags and links."""
        rows = artifacts.versions(of, after=after, limit=limit + 1, descending=order == "desc")
        shown = views.versions(of, rows[:limit])
        return web.page([*shown, *({} for _ in rows[limit:])], limit, dict)

    @router.get(prefix + "/versions/{version}")
    def get_version(found: one) -> dict[str, Any]:
        """One version, with presigned addresses of its files."""
        return views.version_with_files(*found)

    @router.put(prefix + "/versions/{version}/aliases/{alias}")
    def add_alias(found: one, alias: str, caller: Caller) -> dict[str, Any]:
        """Name a version, or move the name to it."""
        labels.add_alias(caller, *found, alias)
        return views.version_with_files(*found)

    @router.delete(prefix + "/versions/{version}/aliases/{alias}")
    def remove_alias(found: one, alias: str) -> dict[str, Any]:
        """Take a name off a version."""
        labels.remove_alias(*found, alias)
        return views.version_with_files(*found)

    @router.put(prefix + "/versions/{version}/tags/{tag}")
    def add_tag(found: one, tag: str, caller: Caller) -> dict[str, Any]:
        """Tag a version."""
        labels.add_tag(caller, *found, tag)
        return views.version_with_files(*found)

    @router.delete(prefix + "/versions/{version}/tags/{tag}")
    def remove_tag(found: one, tag: str) -> dict[str, Any]:
        """Take a tag off a version."""
        labels.remove_tag(*found, tag)
        return views.version_with_files(*found)


add_routes("/projects/{entity}/{project}", in_project)
add_routes("/registries/{registry}", in_registry)


@router.get("/projects/{entity}/{project}/collections")
def list_collections(
    entity: str,
    project: str,
    caller: Caller,
    after: web.After = None,
    limit: web.Limit = 20,
    order: web.Order = "asc",
) -> dict[str, Any]:
    """The collections of a project: models and data sets."""
    scope = artifacts.scope(caller, entity, project)
    rows = artifacts.collections(scope, after=after, limit=limit + 1, descending=order == "desc")
    return web.page(rows, limit, views.collection)


@router.post("/projects/{entity}/{project}/collections/{name}/versions")
def create_version(
    entity: str, project: str, name: str, body: CreateVersion, caller: Caller
) -> dict[str, Any]:
    """Make the next version of a data set from uploads, and the data set with its first one."""
    scope = artifacts.scope(caller, entity, project)
    of, made, told = artifacts.add_version(
        caller, scope, name, files=body.files or {}, metadata=body.metadata or {}
    )
    jobs.publish(told)
    return views.version_with_files(of, made)


@router.post("/projects/{entity}/{project}/collections/{name}/versions/{version}/links")
def create_link(
    of: Annotated[Collection, Depends(in_project)], version: str, body: Link, caller: Caller
) -> dict[str, Any]:
    """Link a version into a collection of a registry."""
    linked = artifacts.version(of, version)
    return views.version_with_files(
        *registries.link(caller, of, linked, registry=body.registry, name=body.collection)
    )


@router.post("/registries")
def create_registry(body: CreateRegistry, caller: Caller) -> dict[str, Any]:
    """Make a registry, or get the one of that name."""
    return views.registry(registries.create(caller, body.name))


@router.get("/registries")
def list_registries(
    caller: Caller, after: web.After = None, limit: web.Limit = 20, order: web.Order = "asc"
) -> dict[str, Any]:
    """The team's registries."""
    rows = registries.page(caller.team, after=after, limit=limit + 1, descending=order == "desc")
    return web.page(rows, limit, views.registry)


@router.get("/registries/{registry}")
def get_registry(registry: str, caller: Caller) -> dict[str, Any]:
    """One registry."""
    return views.registry(registries.get(caller, registry))


@router.get("/registries/{registry}/collections")
def list_registry_collections(
    registry: str, caller: Caller, after: web.After = None, limit: web.Limit = 20, order: web.Order = "asc"
) -> dict[str, Any]:
    """The collections of a registry."""
    scope = registries.get(caller, registry).scope
    rows = artifacts.collections(scope, after=after, limit=limit + 1, descending=order == "desc")
    return web.page(rows, limit, views.collection)


@router.delete("/registries/{registry}/collections/{name}/versions/{version}")
def delete_link(of: Annotated[Collection, Depends(in_registry)], version: str) -> dict[str, Any]:
    """Take a version out of a registry."""
    gone = artifacts.version(of, version)
    registries.unlink(of, gone)
    return {"id": gone.id, "object": "artifact_version", "deleted": True}


@router.post("/projects/{entity}/{project}/runs/{run}/metrics")
def append_metrics(run: RunOf, body: Metrics, caller: Caller) -> dict[str, Any]:
    """Append a row to the history of a run; ``run`` is its id or the name of its model."""
    return views.run_row(runs.append(run, body.metrics, author=caller.user))


@router.get("/projects/{entity}/{project}/runs/{run}/metrics")
def list_metrics(
    run: RunOf, after: web.After = None, limit: web.Limit = 20, order: web.Order = "asc"
) -> dict[str, Any]:
    """The history of a run."""
    rows = runs.history(run, after=after, limit=limit + 1, descending=order == "desc")
    return web.page(rows, limit, views.run_row)


handler = Mangum(web.create_app("Artifacts", router), lifespan="off")
