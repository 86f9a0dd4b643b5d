"""Artifacts: collections of a project and their versions, whatever they are: checkpoints, data sets, links."""

from __future__ import annotations

import re
from typing import Any

from boto3.dynamodb.conditions import Attr

from tuneyard import blobs, checkpoints, clock, ids, payloads, table
from tuneyard.errors import Conflict, Invalid, NotFound
from tuneyard.records import (
    REGISTRY_PROJECT,
    Alias,
    ArtifactEvent,
    Checkpoint,
    CheckpointFile,
    Collection,
    EventType,
    Identity,
    Label,
    Version,
)

MOST_METADATA_BYTES = 64 * 1024
MOST_FILES = 20
_NUMBER = re.compile(r"(v|step)?(\d{1,9})")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def collection(caller: Identity, entity: str, project: str, name: str) -> Collection:
    """The collection; NotFound when there is none or it is another team's."""
    path = f"{entity}/{project}/{name}"
    found = table.get(Collection, path) if entity == caller.team else None
    if found is None:
        raise NotFound(f"No artifact collection {path!r}.")
    return found


def scope(caller: Identity, entity: str, project: str) -> str:
    """The ``entity/project`` of the caller's own team; NotFound for another's."""
    if entity != caller.team:
        raise NotFound(f"No team {entity!r}.")
    check_name("project", project)
    return f"{entity}/{project}"


def collections(scope: str, *, after: str | None, limit: int, descending: bool) -> list[Collection]:
    """The collections of an ``entity/project`` by name, at most ``limit``."""
    if after is not None and table.get(Collection, f"{scope}/{after}") is None:
        raise Invalid(
            f"No collection is called {after!r}; send the id of a row of this list as `after`.", param="after"
        )
    place = None if after is None else (after,)
    return table.children(Collection, scope, after=place, limit=limit, descending=descending)


def versions(of: Collection, *, after: str | None, limit: int, descending: bool) -> list[Version]:
    """The versions of a collection by number, at most ``limit``."""
    place = None if after is None else (ids.position(of.id, after),)
    if of.kind == "model":
        rows = table.children(Checkpoint, of.id, after=place, limit=limit, descending=descending)
        return [of_checkpoint(of, row) for row in rows]
    return table.children(Version, of.id, after=place, limit=limit, descending=descending)


def version(of: Collection, text: str) -> Version:
    """The version that a number, ``v{N}``, ``latest`` or an alias names; NotFound when there is none."""
    number = _named(of, text)
    found = None if number is None else at(of, number)
    if found is None:
        raise NotFound(f"The collection {of.name!r} has no version {text[:200]!r}.")
    return found


def at(of: Collection, number: int) -> Version | None:
    """The version of this number, or None."""
    if of.kind == "model":
        row = table.get(Checkpoint, of.id, number)
        return None if row is None else of_checkpoint(of, row)
    return table.get(Version, of.id, number)


def newest(of: Collection) -> int | None:
    """The number of the version that ``latest`` names, or None when there is none."""
    last = versions(of, after=None, limit=1, descending=True)
    return last[0].version if last else None


def exists(of: Collection, number: int) -> table.Check:
    """The check that a version is there, for a transaction that says something of it."""
    kind = Checkpoint if of.kind == "model" else Version
    return table.Check(kind, (of.id, number), when=table.exists())


def labels(of: Collection, shown: list[Version]) -> dict[int, list[Label]]:
    """The aliases, tags and links of some versions, by their numbers."""
    found: dict[int, list[Label]] = {one.version: [] for one in shown}
    if not found:
        return found
    last: tuple[Any, ...] = (min(found), "", "")
    while rows := table.children(Label, of.id, after=last, limit=500):
        for row in rows:
            if row.version in found:
                found[row.version].append(row)
        if rows[-1].version > max(found):
            break
        last = (rows[-1].version, rows[-1].kind, rows[-1].name)
    return found


def of_checkpoint(of: Collection, row: Checkpoint) -> Version:
    """A checkpoint as a version of its model's collection."""
    return Version(
        id=row.id,
        collection_id=of.id,
        version=row.step,
        metadata=checkpoints.metadata(row),
        files=row.files,
        prefix=row.prefix,
        created_at=row.created_at,
        created_by=of.created_by,
    )


def add_version(
    caller: Identity, scope: str, name: str, *, files: dict[str, str], metadata: dict[str, Any]
) -> tuple[Collection, Version, ArtifactEvent]:
    """Make the next version of a data set from uploaded files, and the data set itself with its first version.

    Files are copied before the row is written, so a version always has them. The event says that ``latest`` moved.
    """
    check_name("name", name)
    check_metadata(metadata)
    _check_files(files)
    path = f"{scope}/{name}"
    for _ in range(20):
        of = table.get(Collection, path) or _new(caller, path)
        if of.kind != "dataset":
            raise Conflict(f"{path!r} is the collection of a {of.kind}; its versions cannot be uploaded.")
        prefix = blobs.artifact_prefix(of.id, of.versions, ids.new())
        made = Version(
            id=ids.ordered(of.id, of.versions),
            collection_id=of.id,
            version=of.versions,
            metadata=metadata,
            files=_copied(caller, files, prefix),
            prefix=prefix,
            created_at=clock.now_ms(),
            created_by=caller.user,
        )
        told = happened(caller, EventType.ADD_ARTIFACT_ALIAS, of, made, alias="latest")
        after = of.model_copy(update={"versions": of.versions + 1})
        unchanged = Attr("id").eq(of.id) & Attr("versions").eq(of.versions)
        try:
            table.transact(
                table.Put(after, new=of.versions == 0, when=unchanged),
                table.Put(made, new=True),
                table.Put(told, new=True),
            )
            return after, made, told
        except table.ConditionFailed:
            blobs.delete_prefix(prefix)
    raise Conflict(f"Too many versions of {path!r} are being made just now. Try again.")


def happened(
    caller: Identity,
    kind: EventType,
    of: Collection,
    what: Version,
    *,
    alias: str | None = None,
    tag: str | None = None,
    also_in: str | None = None,
    data: dict[str, Any] | None = None,
) -> ArtifactEvent:
    """The event that somebody did something to a version, with what the version's metadata is at this moment."""
    entity, _, project = of.scope.partition("/")
    return ArtifactEvent(
        id=ids.new(),
        type=kind,
        entity=entity,
        project=project,
        author=caller.user,
        collection=of.name,
        version=what.version,
        version_name=of.version_name(what.version),
        metadata=what.metadata,
        alias=alias,
        tag=tag,
        also_in=also_in,
        data=(data or {}) | ({"model_id": of.id} if of.kind == "model" else {}),
        created_at=clock.now_ms(),
    )


def training_file(caller: Identity, path: str) -> str:
    """The object with the training data of a data set that is named ``entity/project/name:version``."""
    where, _, text = path.partition(":")
    if where.count("/") != 2:
        raise Invalid(
            f"{path[:200]!r} does not read entity/project/artifact:version.", param="training_data_url"
        )
    found = version(collection(caller, *where.split("/")), text or "latest")
    for name in ("train.jsonl", "trajectories.jsonl"):
        if any(file.name == name for file in found.files):
            return found.prefix + name
    raise Invalid(
        f"The artifact {path[:200]!r} has no file train.jsonl or trajectories.jsonl to train on.",
        param="training_data_url",
    )


def check_name(field: str, value: str) -> None:
    """Invalid unless the text can name a collection, an alias or a tag."""
    if (
        not 1 <= len(value) <= 256
        or value != value.strip()
        or set(value) & set("/\\")
        or any(ord(c) < 32 or ord(c) == 0x7F or 0xD800 <= ord(c) < 0xE000 for c in value)
    ):
        raise Invalid(
            f"{value[:140]!r} cannot be used as {field}: send 1 to 256 characters without '/', '\\' and control "
            "characters.",
            param=field,
        )


def check_metadata(metadata: dict[str, Any]) -> None:
    """Invalid unless metadata can be stored and shown."""
    if not payloads.is_text(metadata) or len(payloads.text(metadata).encode()) > MOST_METADATA_BYTES:
        raise Invalid(
            f"Metadata is at most {MOST_METADATA_BYTES // 1024} KB of JSON with finite numbers and valid Unicode.",
            param="metadata",
        )


def _named(of: Collection, text: str) -> int | None:
    if text == "latest":
        return newest(of)
    if (match := _NUMBER.fullmatch(text)) and (match[1] != "step" or of.kind == "model"):
        return int(match[2])
    row = table.get(Alias, of.id, text)
    return None if row is None else row.version


def _new(caller: Identity, path: str) -> Collection:
    if path.split("/")[1].startswith(REGISTRY_PROJECT):
        raise Invalid(
            "A registry takes links only. Upload to a project, then link the version.", param="project"
        )
    if ":" in path:
        raise Invalid("The name of a data set cannot hold a colon.", param="name")
    return Collection(
        name=path, id=ids.new(), kind="dataset", created_at=clock.now_ms(), created_by=caller.user
    )


def _copied(caller: Identity, files: dict[str, str], prefix: str) -> list[CheckpointFile]:
    copied = []
    for name, url in files.items():
        source = blobs.uploaded_key(caller.team, url)
        if source is None:
            raise Invalid(
                f"{url[:200]!r} is no upload of your team: send the `url` that POST /v1/preview/uploads answered.",
                param="files",
            )
        size = blobs.size(source)
        if size is None:
            raise NotFound(f"Nothing was uploaded to {url!r} yet. PUT the file to its upload_url first.")
        blobs.copy(source, prefix + name)
        copied.append(CheckpointFile(name=name, size=size, sha256=""))
    return copied


def _check_files(files: dict[str, str]) -> None:
    if len(files) > MOST_FILES or not all(_FILE.fullmatch(name) for name in files):
        raise Invalid(
            f"A version has at most {MOST_FILES} files, named by letters, digits, dots, dashes and underscores.",
            param="files",
        )
