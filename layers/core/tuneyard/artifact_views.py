"""How collections, versions, registries and runs look on the wire."""

from __future__ import annotations

from typing import Any

from tuneyard import artifacts, blobs, ids
from tuneyard.clock import iso
from tuneyard.records import Collection, Label, Registry, RunRow, Version
from tuneyard.settings import settings


def collection(record: Collection) -> dict[str, Any]:
    """A collection; its ``id`` in a list is its name in its project."""
    return {
        "id": record.short_name,
        "object": "artifact_collection",
        "name": record.short_name,
        "path": record.name,
        "type": record.kind,
        "model_id": record.id if record.kind == "model" else None,
        "created_at": iso(record.created_at),
        "created_by": record.created_by,
    }


def versions(of: Collection, rows: list[Version]) -> list[dict[str, Any]]:
    """Versions with their aliases, tags and links."""
    found = artifacts.labels(of, rows)
    newest = artifacts.newest(of)
    return [version(of, row, found[row.version], newest) for row in rows]


def version(of: Collection, record: Version, labels: list[Label], newest: int | None) -> dict[str, Any]:
    """A version of a collection."""
    name = of.version_name(record.version)
    names = {kind: [one.name for one in labels if one.kind == kind] for kind in ("alias", "tag", "link")}
    computed = [name, *(["latest"] if record.version == newest else [])]
    return {
        "id": record.id,
        "object": "artifact_version",
        "version": record.version,
        "collection": of.name,
        "type": of.kind,
        "aliases": [*computed, *names["alias"]],
        "tags": names["tag"],
        "links": names["link"],
        "source": record.source,
        "metadata": record.metadata,
        "files": [{"name": file.name, "size": file.size} for file in record.files],
        "artifact_version": f"wandb-artifact:///{of.name}:{name}",
        "created_at": iso(record.created_at),
        "created_by": record.created_by,
    }


def version_with_files(of: Collection, record: Version) -> dict[str, Any]:
    """One version, with a presigned address for each of its files."""
    (shown,) = versions(of, [record])
    seconds = settings().upload_seconds
    for file in shown["files"]:
        file["url"] = blobs.download_url(record.prefix + file["name"], seconds=seconds)
    return shown | {"urls_expire_in": seconds}


def registry(record: Registry) -> dict[str, Any]:
    """A registry."""
    return {
        "id": record.name,
        "object": "registry",
        "name": record.name,
        "team": record.team,
        "project": record.scope.partition("/")[2],
        "created_at": iso(record.created_at),
        "created_by": record.created_by,
    }


def run_row(record: RunRow) -> dict[str, Any]:
    """One row of a run's history."""
    return {
        "id": ids.ordered(record.run_id, record.row),
        "object": "run.metrics",
        "row": record.row,
        "metrics": record.metrics,
        "created_at": iso(record.created_at),
    }
