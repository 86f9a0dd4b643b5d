"""Registries: places of a team that versions of all its projects are linked into, with aliases and tags of their own.

A registry's collections are those of the project ``wandb-registry-{registry}``; their versions are links.
"""

from __future__ import annotations

import contextlib

from boto3.dynamodb.conditions import Attr

from tuneyard import artifacts, clock, ids, table
from tuneyard.errors import Conflict, Invalid, NotFound
from tuneyard.jobs import publish
from tuneyard.records import Alias, Collection, EventType, Identity, Label, Registry, Version


def create(caller: Identity, name: str) -> Registry:
    """Make a registry, or return the one of that name."""
    artifacts.check_name("registry", name)
    registry = Registry(team=caller.team, name=name, created_at=clock.now_ms(), created_by=caller.user)
    if len(name) > 100 or ":" in name:
        raise Invalid("A registry's name has at most 100 characters and no colon.", param="registry")
    with contextlib.suppress(table.ConditionFailed):
        table.write(table.Put(registry, new=True))
    return table.get(Registry, caller.team, name) or registry


def get(caller: Identity, name: str) -> Registry:
    """The team's registry of this name."""
    registry = table.get(Registry, caller.team, name)
    if registry is None:
        raise NotFound(f"No registry {name!r}.")
    return registry


def page(team: str, *, after: str | None, limit: int, descending: bool) -> list[Registry]:
    """The team's registries by name, at most ``limit``."""
    if after is not None and table.get(Registry, team, after) is None:
        raise Invalid(
            f"No registry is called {after!r}; send the id of a row of this list as `after`.", param="after"
        )
    place = None if after is None else (after,)
    return table.children(Registry, team, after=place, limit=limit, descending=descending)


def link(
    caller: Identity, of: Collection, what: Version, *, registry: str, name: str
) -> tuple[Collection, Version]:
    """Link a version into a collection of a registry, as its next version; a link that is there already is returned.

    Registry and collection are made with their first link. One event tells of it, in the registry and in the project
    that the version comes from.
    """
    if of.kind == "registry":
        raise Invalid("This version is a link itself. Link the version that it stands for.", param="version")
    artifacts.check_name("collection", name)
    if ":" in name:
        raise Invalid("The name of a collection cannot hold a colon.", param="collection")
    path = f"{create(caller, registry).scope}/{name}"
    source = f"{of.name}:{of.version_name(what.version)}"
    for _ in range(20):
        into = table.get(Collection, path) or _new(caller, path)
        linked = table.get(Label, of.id, what.version, "link", path)
        if linked is not None and (there := table.get(Version, into.id, linked.target or 0)) is not None:
            return into, there
        made = Version(
            id=ids.ordered(into.id, into.versions),
            collection_id=into.id,
            version=into.versions,
            metadata=what.metadata,
            files=what.files,
            prefix=what.prefix,
            source=source,
            created_at=clock.now_ms(),
            created_by=caller.user,
        )
        told = artifacts.happened(
            caller, EventType.LINK_ARTIFACT, into, made, also_in=of.scope, data={"source": source}
        )
        after = into.model_copy(update={"versions": into.versions + 1})
        unchanged = Attr("id").eq(into.id) & Attr("versions").eq(into.versions)
        label = Label(collection_id=of.id, version=what.version, kind="link", name=path, target=made.version)
        try:
            table.transact(
                artifacts.exists(of, what.version),
                table.Put(after, new=into.versions == 0, when=unchanged),
                table.Put(made, new=True),
                table.Put(label, new=linked is None),
                table.Put(told, new=True),
            )
        except table.ConditionFailed as error:
            if 0 in error.failed:
                raise NotFound(f"The version {source} was deleted.") from error
            continue
        publish(told)
        return after, made
    raise Conflict(f"Too many versions are being linked into {path!r} just now. Try again.")


def unlink(of: Collection, what: Version) -> None:
    """Take a version out of a registry, with its aliases and tags; what it stands for stays."""
    if of.kind != "registry" or what.source is None:
        raise Invalid("Only links of a registry can be removed here.", param="version")
    for _ in range(20):
        try:
            _unlink(of, what)
        except table.ConditionFailed:
            continue
        return
    raise Conflict(
        f"Aliases of {of.name}:{of.version_name(what.version)} are being moved just now. Try again."
    )


def _unlink(of: Collection, what: Version) -> None:
    """Remove a link with all that names it, at once; when it has dozens of names, first those that are too many."""
    writes: list[table.Write] = []
    for label in artifacts.labels(of, [what])[what.version]:
        if label.kind == "alias":
            mine = Attr("pk").not_exists() | Attr("version").eq(what.version)
            writes.append(table.Delete(Alias, (of.id, label.name), when=mine))
        writes.append(table.Delete(Label, (of.id, what.version, label.kind, label.name)))
    writes.append(table.Delete(Version, (of.id, what.version)))
    source, _, name = (what.source or "").rpartition(":")
    origin = table.get(Collection, source)
    if origin is not None:
        writes.append(table.Delete(Label, (origin.id, int(name.lstrip("stepv")), "link", of.name)))
    for start in range(0, len(writes), 100):
        table.transact(*writes[start : start + 100])


def _new(caller: Identity, path: str) -> Collection:
    return Collection(
        name=path, id=ids.new(), kind="registry", created_at=clock.now_ms(), created_by=caller.user
    )
