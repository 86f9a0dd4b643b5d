"""Automations: which webhook is called when what happens in a project or a registry."""

from __future__ import annotations

from typing import Any

from boto3.dynamodb.conditions import Attr, ConditionBase

from tuneyard import clock, ids, matching, members, payloads, table
from tuneyard.errors import Invalid, NotFound
from tuneyard.records import REGISTRY_PROJECT, EventType, Identity
from tuneyard.webhook_records import Automation, Webhook

EVENTS = (
    EventType.ADD_ARTIFACT_ALIAS,
    EventType.ADD_ARTIFACT_TAG,
    EventType.LINK_ARTIFACT,
    EventType.RUN_METRIC,
    EventType.RUN_STATE,
)
RUN_STATES = ("running", "finished", "failed", "cancelled")
_RUN_EVENTS = (EventType.RUN_METRIC, EventType.RUN_STATE)
_ONLY_FOR = {
    "alias_regex": (EventType.ADD_ARTIFACT_ALIAS,),
    "tag_regex": (EventType.ADD_ARTIFACT_TAG,),
    "metric": (EventType.RUN_METRIC,),
    "run_states": (EventType.RUN_STATE,),
    "run_user": _RUN_EVENTS,
    "run_name_regex": _RUN_EVENTS,
}


def create(caller: Identity, *, scope: str, fields: dict[str, Any]) -> Automation:
    """Make an automation; whatever is wrong with it and can be known now is refused now."""
    members.require_scope_admin(caller, scope, "make automations of it")
    now = clock.now_ms()
    automation = Automation(
        id=ids.new(),
        team=caller.team,
        scope=scope,
        created_at=now,
        created_by=caller.user,
        updated_at=now,
        **fields,
    )
    _check(automation)
    _write(table.Put(automation, new=True), caller, before=None, after=automation.webhook_id)
    return automation


def get(caller: Identity, automation_id: str) -> Automation:
    """The automation; NotFound when there is none or it is another team's."""
    automation = table.get(Automation, automation_id)
    if automation is None or automation.team != caller.team:
        raise NotFound(f"No automation {automation_id!r}.")
    return automation


def page(
    team: str, *, filters: dict[str, Any], after: str | None, limit: int, descending: bool
) -> list[Automation]:
    """The team's automations in order of creation, those whose fields are as ``filters`` says, at most ``limit``."""
    start = None
    if after is not None:
        start = table.get(Automation, after)
        if start is None or start.team != team:
            raise Invalid(
                f"No automation has the id {after!r}; send the id of a row of this list as `after`.",
                param="after",
            )
    only: ConditionBase | None = None
    for name, value in filters.items():
        if value is not None:
            wanted = Attr(name).eq(value)
            only = wanted if only is None else only & wanted
    return table.listed(
        Automation, "by_team", team, after=start, limit=limit, descending=descending, only=only
    )


def update(
    caller: Identity, automation: Automation, *, scope: str | None, fields: dict[str, Any]
) -> Automation:
    """Change an automation; what it fired for already goes out as it was."""
    members.require_scope_admin(caller, automation.scope, "change its automations")
    changes = fields | ({"scope": scope} if scope else {})
    if scope and scope != automation.scope:
        members.require_scope_admin(caller, scope, "make automations of it")
    changed = Automation.model_validate(
        automation.model_dump() | changes | {"rev": automation.rev + 1, "updated_at": clock.now_ms()}
    )
    _check(changed)
    unchanged = Attr("rev").eq(automation.rev)
    before = automation.webhook_id
    _write(table.Put(changed, when=unchanged), caller, before=before, after=changed.webhook_id)
    return changed


def delete(caller: Identity, automation: Automation) -> None:
    """Delete an automation; what it still has to deliver is cancelled, and its history stays readable."""
    members.require_scope_admin(caller, automation.scope, "delete its automations")
    gone = table.Delete(Automation, (automation.id,), when=Attr("rev").eq(automation.rev))
    _write(gone, caller, before=automation.webhook_id, after=None)


def scope_of(caller: Identity, *, project: str | None, registry: str | None, entity: str | None) -> str:
    """The ``entity/project`` of a scope as a client names it; NotFound for another team's."""
    if entity not in (None, caller.team):
        raise NotFound(f"No team {entity!r}.")
    name = project if registry is None else registry
    if not name or "/" in name or len(name) > 128 or not payloads.is_text(name):
        raise Invalid("A scope names a project or a registry of your team.", param="scope")
    if registry is None and name.startswith(REGISTRY_PROJECT):
        raise Invalid(
            f"{name!r} is a registry: use the scope {{'type': 'registry', 'registry': ...}}.", param="scope"
        )
    return f"{caller.team}/{name if registry is None else REGISTRY_PROJECT + registry}"


def _check(automation: Automation) -> None:
    event = automation.event
    if event not in EVENTS:
        raise Invalid(f"No automation can listen to {event}; use one of {', '.join(EVENTS)}.", param="event")
    _check_texts(automation)
    registry = automation.scope.partition("/")[2].startswith(REGISTRY_PROJECT)
    if registry and event in _RUN_EVENTS:
        raise Invalid(f"{event} happens in projects only: a registry has no runs.", param="event")
    for field, events in _ONLY_FOR.items():
        if getattr(automation, field) and event not in events:
            raise Invalid(f"{field} goes with {' and '.join(events)}, not with {event}.", param=field)
    if event is EventType.ADD_ARTIFACT_ALIAS and automation.alias_regex is None:
        raise Invalid(
            "alias_regex is required for ADD_ARTIFACT_ALIAS; send '.*' to fire on every alias.",
            param="alias_regex",
        )
    if event is EventType.RUN_METRIC and automation.metric is None:
        raise Invalid("metric is required for RUN_METRIC.", param="metric")
    if unknown := [state for state in automation.run_states if state not in RUN_STATES]:
        raise Invalid(f"{unknown[0]!r} is no state; use {', '.join(RUN_STATES)}.", param="run_states")
    for field in ("alias_regex", "tag_regex", "run_name_regex"):
        pattern = getattr(automation, field)
        if pattern is not None:
            matching.check_pattern(pattern, param=field)


def _check_texts(automation: Automation) -> None:
    if not 1 <= len(automation.name) <= 128:
        raise Invalid("An automation's name has 1 to 128 characters.", param="name")
    if len(automation.description or "") > 4096:
        raise Invalid("A description has at most 4096 characters.", param="description")
    for field in ("name", "description", "run_user"):
        if not payloads.is_text(getattr(automation, field)):
            raise Invalid(f"{field} holds half of a surrogate pair, which is no valid Unicode.", param=field)


def _write(
    change: table.Put | table.Delete, caller: Identity, *, before: str | None, after: str | None
) -> None:
    """Change an automation, and count it in its webhook, which cannot be deleted meanwhile.

    The payload is checked against the webhook's secret in the same transaction.
    """
    writes: list[table.Write] = [change]
    if after is not None:
        writes.append(_used(change, caller, after, first=after != before))
    if before is not None and before != after:
        writes.append(table.Update(Webhook, (before,), add={"automations": -1}))
    try:
        table.transact(*writes)
    except table.ConditionFailed as error:
        if 1 in error.failed and after is not None:
            raise Invalid(
                "The webhook changed or was deleted just now. Try again.", param="webhook_id"
            ) from error
        raise


def _used(change: table.Put | table.Delete, caller: Identity, webhook_id: str, *, first: bool) -> table.Write:
    webhook = table.get(Webhook, webhook_id)
    if webhook is None or webhook.team != caller.team:
        raise NotFound(f"No webhook {webhook_id!r}.")
    if (
        isinstance(change, table.Put)
        and isinstance(change.record, Automation)
        and change.record.payload is not None
    ):
        payloads.check(change.record.payload, secret=webhook.secret)
    secret = Attr("secret").not_exists() if webhook.secret is None else Attr("secret").eq(webhook.secret)
    same = Attr("team").eq(caller.team) & secret
    if first:
        return table.Update(Webhook, (webhook_id,), add={"automations": 1}, when=same)
    return table.Check(Webhook, (webhook_id,), when=same)
