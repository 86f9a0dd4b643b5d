"""Artifacts and registries: collections, versions, aliases, tags and links; and the metrics of runs."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from mangum import Mangum
from pydantic import BaseModel, ConfigDict, Field
from tuneyard import artifact_views as views
from tuneyard import artifacts, jobs, labels, members, registry, runs, web
from tuneyard.auth import Caller
from tuneyard.errors import Invalid
from tuneyard.records import Collection, Version
from tuneyard.trajectories import Number

router = APIRouter(prefix="/v1", tags=["Artifacts"])
_PROJECT = "/projects/{entity}/{project}"
_REGISTRY = "/registries/{registry}"
_VERSION = "/collections/{name}/versions/{version}"


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

    metrics: dict[Annotated[str, Field(min_length=1, max_length=256)], Number] = Field(min_length=1, max_length=500)


def in_project(entity: str, project: str, name: str, caller: Caller) -> Collection:
    """The collection that a path names in a project."""
    return artifacts.collection(caller, entity, project, name)


def in_registry(registry: str, name: str, caller: Caller) -> Collection:  # noqa: F811  the path's own word
    """The collection that a path names in a registry."""
    return artifacts.collection(caller, caller.team, f"{artifacts.REGISTRY_PROJECT}{registry}", name)


InProject = Annotated[Collection, Depends(in_project)]
InRegistry = Annotated[Collection, Depends(in_registry)]


def version_in_project(of: InProject, version: str) -> Version:
    """The version that a path names in a project."""
    return artifacts.version(of, version)


def version_in_registry(of: InRegistry, version: str) -> Version:
    """The version that a path names in a registry."""
    return artifacts.version(of, version)
