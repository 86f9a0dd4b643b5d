"""Teams: their members, API keys and secrets. Members read; administrators change."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from mangum import Mangum
from pydantic import BaseModel, ConfigDict, Field

from tuneyard import credentials, members, signatures, teams, web
from tuneyard import webhook_views as views
from tuneyard.auth import Caller
from tuneyard.records import Identity, Role

router = APIRouter(prefix="/v1/teams/{team}", tags=["Teams"])


class Body(BaseModel):
    """Management bodies refuse what they do not know."""

    model_config = ConfigDict(extra="forbid")


class Grant(Body):
    """A project or registry that a member administers."""

    type: Literal["project", "registry"]
    project: str | None = None
    registry: str | None = None


class PutMember(Body):
    """What a member may do."""

    role: Role = Role.MEMBER
    admin_of: list[Grant] = Field(default_factory=list, max_length=100)


class CreateKey(Body):
    """A key to make."""

    name: str = Field("", max_length=128)
    user: str | None = None
    role: Role | None = None


class PutSecret(Body):
    """A secret's value; a value that it replaces signs for a while longer."""

    value: str
    overlap_hours: float = Field(credentials.OVERLAP_HOURS, ge=0, le=168)


def own(team: str, caller: Caller) -> Identity:
    """The caller, whose own team the path names."""
    members.require_team(caller, team)
    return caller


def administrator(caller: Annotated[Identity, Depends(own)]) -> Identity:
    """The caller, who administers the team that the path names."""
    caller.require_admin("change its members, keys and secrets")
    return caller


Member = Annotated[Identity, Depends(own)]
Admin = Annotated[Identity, Depends(administrator)]


@router.get("/members")
def list_members(
    caller: Member, after: web.After = None, limit: web.Limit = 20, order: web.Order = "asc"
) -> dict[str, Any]:
    """The team's members by name."""
    rows = members.page(caller.team, after=after, limit=limit + 1, descending=order == "desc")
    return web.page(rows, limit, views.member)


@router.put("/members/{user}")
def put_member(user: str, body: PutMember, caller: Admin) -> dict[str, Any]:
    """Add a member, or change what one may do."""
    grants = [members.granted(caller, one.type, one.project, one.registry) for one in body.admin_of]
    return views.member(members.put(caller, user, role=body.role, admin_of=grants))


@router.delete("/members/{user}")
def remove_member(user: str, caller: Admin) -> dict[str, Any]:
    """Take a member out of the team; their keys end with it."""
    members.remove(caller, user)
    return {"id": user, "object": "team.member", "deleted": True}


@router.post("/api-keys")
def create_api_key(body: CreateKey, caller: Admin) -> dict[str, Any]:
    """Make a key for a member. It is shown in this answer and never again."""
    key, text = members.create_key(caller, user=body.user, role=body.role, name=body.name)
    return views.api_key(key) | {"key": text}


@router.get("/api-keys")
def list_api_keys(
    caller: Member, after: web.After = None, limit: web.Limit = 20, order: web.Order = "asc"
) -> dict[str, Any]:
    """The team's keys, without the keys."""
    rows = members.keys(caller.team, after=after, limit=limit + 1, descending=order == "desc")
    return web.page(rows, limit, views.api_key)


@router.delete("/api-keys/{key_id}")
def revoke_api_key(key_id: str, caller: Admin) -> dict[str, Any]:
    """End a key; requests with it are refused within a minute."""
    teams.revoke_key(caller.team, key_id)
    return {"id": key_id, "object": "team.api_key", "revoked": True}


@router.put("/secrets/{name}")
def put_secret(name: str, body: PutSecret, caller: Admin) -> dict[str, Any]:
    """Store or replace a secret. The answer shows, once, how a Standard Webhooks library takes it as signing key."""
    stored = credentials.put(caller, name, body.value, overlap_hours=body.overlap_hours)
    return views.secret(stored) | {"standard_webhooks_secret": signatures.pasteable(body.value)}


@router.get("/secrets")
def list_secrets(
    caller: Member, after: web.After = None, limit: web.Limit = 20, order: web.Order = "asc"
) -> dict[str, Any]:
    """The names of the team's secrets."""
    rows = credentials.page(caller.team, after=after, limit=limit + 1, descending=order == "desc")
    return web.page(rows, limit, views.secret)


@router.delete("/secrets/{name}")
def delete_secret(name: str, caller: Admin) -> dict[str, Any]:
    """Delete a secret that no webhook uses."""
    credentials.delete(caller, name)
    return {"id": name, "object": "team.secret", "deleted": True}


handler = Mangum(web.create_app("Teams", router), lifespan="off")
