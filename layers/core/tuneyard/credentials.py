"""Team secrets: access tokens and signing keys, written and replaced by name, and never shown again."""

from __future__ import annotations

import re

from boto3.dynamodb.conditions import Attr

from tuneyard import clock, ids, payloads, signatures, table, vault
from tuneyard.errors import Conflict, Invalid, NotFound
from tuneyard.records import Identity
from tuneyard.webhook_records import Secret

OVERLAP_HOURS = 24.0
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_MOST_CHARACTERS = 4096


def put(caller: Identity, name: str, value: str, *, overlap_hours: float = OVERLAP_HOURS) -> Secret:
    """Store a secret, or replace its value: then the one before it signs as well for ``overlap_hours``.

    The same value again changes nothing, so a repeated request does not end the overlap.
    """
    _check_name(name)
    _check_value(value)
    if table.get(Secret, caller.team, name) is None and (made := _create(caller, name, value)) is not None:
        return made
    row = table.get(Secret, caller.team, name)
    if row is None:
        raise Conflict(f"The secret {name!r} is being deleted just now. Try again.")
    return _replace(row, value, overlap_hours)


def page(team: str, *, after: str | None, limit: int, descending: bool) -> list[Secret]:
    """The names of the team's secrets in alphabetical order, at most ``limit``."""
    if after is not None and table.get(Secret, team, after) is None:
        raise Invalid(
            f"No secret is called {after!r}; send the id of a row of this list as `after`.", param="after"
        )
    place = None if after is None else (after,)
    return table.children(Secret, team, after=place, limit=limit, descending=descending)


def delete(caller: Identity, name: str) -> None:
    """Delete a secret that no webhook uses; the row goes first, so that nothing can begin to use it."""
    row = table.get(Secret, caller.team, name)
    if row is None:
        raise NotFound(f"No secret {name!r} in team {caller.team!r}.")
    unused = Attr("id").eq(row.id) & Attr("as_token").eq(0) & Attr("as_secret").eq(0)
    try:
        table.write(table.Delete(Secret, (caller.team, name), when=unused))
    except table.ConditionFailed as error:
        raise Conflict(
            f"The secret {name!r} is used by a webhook. Give the webhook another one, or none, first."
        ) from error
    vault.delete(caller.team, row.id)


def attached(team: str, name: str) -> Secret:
    """The secret of this name; Invalid when there is none."""
    row = table.get(Secret, team, name)
    if row is None:
        raise Invalid(
            f"There is no secret {name!r}. Store it first: PUT /v1/teams/{team}/secrets/{name}.",
            param="secret",
        )
    return row


def _create(caller: Identity, name: str, value: str) -> Secret | None:
    """The new secret, its value stored before its name; None when there was one of that name."""
    now = clock.now_ms()
    row = Secret(
        team=caller.team,
        name=name,
        id=ids.new(),
        fits_header=_fits_header(value),
        created_at=now,
        created_by=caller.user,
        updated_at=now,
    )
    vault.create(caller.team, row.id, vault.Stored(value))
    try:
        table.write(table.Put(row, new=True))
    except table.ConditionFailed:
        vault.delete(caller.team, row.id)
        return None
    return row


def _replace(row: Secret, value: str, overlap_hours: float) -> Secret:
    now = clock.now_ms()
    try:
        old = vault.read(row.team, row.id, fresh=True)
    except vault.Unreadable as error:
        raise Conflict(
            f"The value of {row.name!r} cannot be replaced just now ({error}). Try again."
        ) from error
    if old.value == value:
        return row
    fits = _fits_header(value)
    change = table.Update(
        type(row),
        (row.team, row.name),
        set={"fits_header": fits, "updated_at": now},
        when=Attr("id").eq(row.id) if fits else Attr("id").eq(row.id) & Attr("as_token").eq(0),
    )
    try:
        table.write(change)
    except table.ConditionFailed as error:
        raise Invalid(
            f"A webhook sends {row.name!r} as its access token, and this value cannot stand in a header: "
            "use printable ASCII characters only.",
            param="value",
        ) from error
    until = now + round(overlap_hours * 3_600_000)
    vault.replace(row.team, row.id, vault.Stored(value, old.value, until))
    return row.model_copy(update={"fits_header": fits, "updated_at": now})


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise Invalid(
            f"{name[:80]!r} cannot name a secret: use 1 to 64 letters, digits and underscores, and begin with none "
            "of the digits.",
            param="name",
        )
    if name in payloads.RESERVED:
        raise Invalid(
            f"{name!r} is the name of a payload variable and cannot name a secret. Use another name.",
            param="name",
        )


def _check_value(value: str) -> None:
    if not 1 <= len(value) <= _MOST_CHARACTERS:
        raise Invalid(f"A secret has 1 to {_MOST_CHARACTERS} characters.", param="value")
    if value != value.strip() or any(
        ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or 0xD800 <= ord(c) < 0xE000 for c in value
    ):
        raise Invalid(
            "A secret cannot begin or end with a space, nor hold line breaks or other control characters: "
            "a header cannot carry them. Check what was pasted.",
            param="value",
        )
    if not signatures.is_sound(value):
        raise Invalid("A secret that begins with whsec_ must go on with valid base64.", param="value")


def _fits_header(value: str) -> bool:
    return value.isascii()
