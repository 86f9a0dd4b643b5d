"""Teams and their API keys."""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets

from boto3.dynamodb.conditions import Attr

from tuneyard import clock, ids, table
from tuneyard.errors import Conflict, Invalid, NotFound
from tuneyard.records import ApiKey, Member, Role, Team

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def create_team(name: str) -> Team:
    """Make a team; Conflict when there is one of that name."""
    if not _NAME.fullmatch(name):
        raise Invalid(
            f"{name!r} cannot name a team: use 1 to 64 letters, digits, dots, dashes and underscores.",
            param="name",
        )
    team = Team(name=name, created_at=clock.now_ms())
    try:
        table.write(table.Put(team, new=True))
    except table.ConditionFailed as error:
        raise Conflict(f"There is a team {name!r} already.") from error
    return team


def create_key(*, team: str, user: str, role: Role, name: str = "") -> tuple[ApiKey, str]:
    """Make a key; the second value is the key itself, which is kept nowhere and shown only now.

    Who has a key is a member of the team: a new user becomes one with the key's role.
    """
    if table.get(Team, team) is None:
        raise NotFound(f"No team {team!r}.")
    key, text = new_key(team=team, user=user, role=role, name=name)
    member = Member(team=team, user=user, role=role, created_at=key.created_at)
    with contextlib.suppress(table.ConditionFailed):
        table.write(table.Put(member, new=True))
    table.write(table.Put(key, new=True))
    return key, text


def new_key(*, team: str, user: str, role: Role, name: str) -> tuple[ApiKey, str]:
    """A key that is not stored yet, and its text."""
    text = f"ty_{secrets.token_urlsafe(32)}"
    key = ApiKey(
        id=ids.new(),
        hash=digest(text),
        team=team,
        user=user,
        role=role,
        name=name,
        created_at=clock.now_ms(),
    )
    return key, text


def find_key(text: str) -> ApiKey | None:
    """The record of a key that may be used now, or None."""
    key = table.get(ApiKey, digest(text))
    return key if key is not None and key.revoked_at is None else None


def revoke_key(team: str, key_id: str) -> None:
    """End a key; requests with it are refused within a minute."""
    for key in table.listed(ApiKey, "by_team", team, limit=10_000):
        if key.id == key_id:
            when = Attr("revoked_at").not_exists()
            with contextlib.suppress(table.ConditionFailed):
                table.write(table.Update(ApiKey, (key.hash,), set={"revoked_at": clock.now_ms()}, when=when))
            return
    raise NotFound(f"No API key {key_id!r}.")


def digest(text: str) -> str:
    """How a key is stored: the SHA-256 of its text, which holds 256 random bits."""
    return hashlib.sha256(text.encode()).hexdigest()
