"""Who belongs to a team, and what each may do: administrators everything, others what they were granted."""

from __future__ import annotations

from boto3.dynamodb.conditions import Attr

from tuneyard import clock, table, teams
from tuneyard.errors import Conflict, Forbidden, Invalid, NotFound
from tuneyard.records import REGISTRY_PROJECT, ApiKey, Identity, Member, Role


def require_team(caller: Identity, team: str) -> None:
    """NotFound unless the team is the caller's own."""
    if team != caller.team:
        raise NotFound(f"No team {team!r}.")


def require_scope_admin(caller: Identity, scope: str, to_do: str) -> None:
    """Forbidden unless the caller administers this ``entity/project``, or the registry that it is."""
    if caller.role is Role.ADMIN:
        return
    member = table.get(Member, caller.team, caller.user)
    granted = grant(scope)
    if member is None or granted not in member.admin_of:
        kind, _, name = granted.partition(":")
        raise Forbidden(
            f"Only an administrator of the {kind} {name!r} or of team {caller.team!r} may {to_do}. "
            "Ask one of them to do it, or to grant it to you."
        )


def grant(scope: str) -> str:
    """What a member is granted to administer an ``entity/project``."""
    project = scope.partition("/")[2]
    if project.startswith(REGISTRY_PROJECT):
        return f"registry:{project.removeprefix(REGISTRY_PROJECT)}"
    return f"project:{project}"


def granted(caller: Identity, kind: str, project: str | None, registry: str | None) -> str:
    """What a member is granted, as a client names it."""
    name = project if kind == "project" else registry
    if not name or (project and registry):
        raise Invalid(f"A grant of type {kind!r} names a {kind} and nothing else.", param="admin_of")
    return grant(f"{caller.team}/{name if kind == 'project' else REGISTRY_PROJECT + name}")


def page(team: str, *, after: str | None, limit: int, descending: bool) -> list[Member]:
    """The team's members by name, at most ``limit``."""
    if after is not None and table.get(Member, team, after) is None:
        raise Invalid(
            f"No member is called {after!r}; send the id of a row of this list as `after`.", param="after"
        )
    place = None if after is None else (after,)
    return table.children(Member, team, after=place, limit=limit, descending=descending)


def put(caller: Identity, user: str, *, role: Role, admin_of: list[str]) -> Member:
    """Add a member, or change what one may do; keys of someone who is no longer administrator lose that too.

    The caller must still be one in the same transaction, so that two cannot demote each other and leave nobody.
    """
    _check_user(user)
    if user == caller.user and role is not Role.ADMIN:
        raise Conflict("You cannot take your own administrator's role away. Ask another administrator.")
    old = table.get(Member, caller.team, user)
    member = Member(
        team=caller.team,
        user=user,
        role=role,
        admin_of=sorted(set(admin_of)),
        created_at=old.created_at if old else clock.now_ms(),
    )
    _write(caller, user, table.Put(member))
    if role is not Role.ADMIN:
        for key in _keys(caller.team, user):
            if key.role is Role.ADMIN:
                table.write(table.Update(ApiKey, (key.hash,), set={"role": role.value}))
    return member


def remove(caller: Identity, user: str) -> None:
    """Take a member out of the team and revoke their keys, which are refused within a minute."""
    if user == caller.user:
        raise Conflict("You cannot remove yourself. Ask another administrator.")
    if table.get(Member, caller.team, user) is None and not _keys(caller.team, user):
        raise NotFound(f"No member {user!r} in team {caller.team!r}.")
    _write(caller, user, table.Delete(Member, (caller.team, user)))
    for key in _keys(caller.team, user):
        teams.revoke_key(caller.team, key.id)


def create_key(caller: Identity, *, user: str | None, role: Role | None, name: str) -> tuple[ApiKey, str]:
    """Make a key for a member, with the member's role or a lesser one; the second value is the key, shown once."""
    member = table.get(Member, caller.team, user or caller.user)
    if member is None:
        raise NotFound(f"No member {user!r} in team {caller.team!r}. Add the member first.")
    if role is Role.ADMIN and member.role is not Role.ADMIN:
        raise Invalid(f"{member.user!r} is no administrator, so no key of theirs can be one.", param="role")
    key, text = teams.new_key(team=caller.team, user=member.user, role=role or member.role, name=name)
    unchanged = table.Check(Member, (caller.team, member.user), when=Attr("role").eq(member.role.value))
    table.transact(table.Put(key, new=True), unchanged)
    return key, text


def keys(team: str, *, after: str | None, limit: int, descending: bool) -> list[ApiKey]:
    """The team's keys in order of creation, revoked ones included, at most ``limit``."""
    start = None
    if after is not None:
        start = next(
            (key for key in table.listed(ApiKey, "by_team", team, limit=10_000) if key.id == after), None
        )
        if start is None:
            raise Invalid(
                f"No key has the id {after!r}; send the id of a row of this list as `after`.", param="after"
            )
    return table.listed(ApiKey, "by_team", team, after=start, limit=limit, descending=descending)


def _keys(team: str, user: str) -> list[ApiKey]:
    mine = Attr("user").eq(user) & Attr("revoked_at").not_exists()
    return table.listed(ApiKey, "by_team", team, limit=10_000, only=mine)


def _write(caller: Identity, user: str, change: table.Put | table.Delete) -> None:
    writes: list[table.Write] = [change]
    if user != caller.user:
        still = Attr("role").eq(Role.ADMIN.value)
        writes.append(table.Check(Member, (caller.team, caller.user), when=still))
    try:
        table.transact(*writes)
    except table.ConditionFailed as error:
        raise Forbidden(
            f"You are no administrator of team {caller.team!r} any more, or you were made one by a key alone: "
            "ask an administrator who is a member."
        ) from error


def _check_user(user: str) -> None:
    if not 1 <= len(user) <= 128 or not user.isprintable() or user != user.strip() or "/" in user:
        raise Invalid(
            f"{user[:140]!r} cannot name a user: use 1 to 128 printable characters without '/'.", param="user"
        )
