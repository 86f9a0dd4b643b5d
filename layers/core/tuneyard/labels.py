"""Aliases and tags of artifact versions: an alias names one version of its collection and can move, a tag is free."""

from __future__ import annotations

import re

from boto3.dynamodb.conditions import Attr

from tuneyard import artifacts, table
from tuneyard.errors import Conflict, Invalid, NotFound
from tuneyard.jobs import publish
from tuneyard.records import Alias, Collection, EventType, Identity, Label, Version

_COMPUTED = re.compile(r"latest|(v|step)?\d{1,9}")


def add_alias(caller: Identity, of: Collection, what: Version, alias: str) -> None:
    """Name a version, or move the name to it: one event, and none when it has the name already."""
    artifacts.check_name("alias", alias)
    if _COMPUTED.fullmatch(alias):
        _check_computed(of, what, alias)
        return
    told = artifacts.happened(caller, EventType.ADD_ARTIFACT_ALIAS, of, what, alias=alias)
    for _ in range(20):
        row = table.get(Alias, of.id, alias)
        if row is not None and row.version == what.version:
            return
        new = Alias(collection_id=of.id, alias=alias, version=what.version)
        writes: list[table.Write] = [
            artifacts.exists(of, what.version),
            table.Put(new, new=True) if row is None else table.Put(new, when=Attr("version").eq(row.version)),
            table.Put(_label(of, what.version, "alias", alias)),
            table.Put(told, new=True),
        ]
        if row is not None:
            writes.append(table.Delete(Label, (of.id, row.version, "alias", alias)))
        try:
            table.transact(*writes)
        except table.ConditionFailed as error:
            _raise_if_gone(error, of, what)
            continue
        publish(told)
        return
    raise Conflict(f"The alias {alias!r} is being moved by others just now. Try again.")


def remove_alias(of: Collection, what: Version, alias: str) -> None:
    """Take a name off a version; NotFound when the version does not have it."""
    if _COMPUTED.fullmatch(alias):
        raise Invalid(f"{alias!r} follows from the version's place and cannot be removed.", param="alias")
    try:
        table.transact(
            table.Delete(Alias, (of.id, alias), when=Attr("version").eq(what.version)),
            table.Delete(Label, (of.id, what.version, "alias", alias)),
        )
    except table.ConditionFailed as error:
        raise NotFound(f"{of.name}:{of.version_name(what.version)} has no alias {alias!r}.") from error


def add_tag(caller: Identity, of: Collection, what: Version, tag: str) -> None:
    """Tag a version: one event, and none when it has the tag already."""
    artifacts.check_name("tag", tag)
    told = artifacts.happened(caller, EventType.ADD_ARTIFACT_TAG, of, what, tag=tag)
    try:
        table.transact(
            artifacts.exists(of, what.version),
            table.Put(_label(of, what.version, "tag", tag), new=True),
            table.Put(told, new=True),
        )
    except table.ConditionFailed as error:
        _raise_if_gone(error, of, what)
        return
    publish(told)


def remove_tag(of: Collection, what: Version, tag: str) -> None:
    """Take a tag off a version; NotFound when the version does not have it."""
    try:
        table.write(table.Delete(Label, (of.id, what.version, "tag", tag), when=table.exists()))
    except table.ConditionFailed as error:
        raise NotFound(f"{of.name}:{of.version_name(what.version)} has no tag {tag!r}.") from error


def _label(of: Collection, version: int, kind: str, name: str) -> Label:
    return Label.model_validate({"collection_id": of.id, "version": version, "kind": kind, "name": name})


def _check_computed(of: Collection, what: Version, alias: str) -> None:
    own = {of.version_name(what.version)} | ({"latest"} if artifacts.newest(of) == what.version else set())
    if alias not in own:
        raise Invalid(
            f"{alias!r} cannot be given: latest, v{{N}}, step{{N}} and plain numbers follow from a version's place.",
            param="alias",
        )


def _raise_if_gone(error: table.ConditionFailed, of: Collection, what: Version) -> None:
    if 0 in error.failed:
        raise NotFound(f"The version {of.name}:{of.version_name(what.version)} was deleted.") from error
