"""Webhooks, the automations that call them, and what became of every delivery."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from mangum import Mangum
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from tuneyard import automations, clock, deliveries, members, table, web, webhooks
from tuneyard import webhook_views as views
from tuneyard.auth import Caller
from tuneyard.credentials import OVERLAP_HOURS
from tuneyard.records import EventType, Identity
from tuneyard.webhook_records import Automation, Delivery, MetricRule, Webhook

router = APIRouter(prefix="/v1", tags=["Automations"])
_WEBHOOKS = "/teams/{team}/webhooks"


class Body(BaseModel):
    """Management bodies refuse what they do not know."""

    model_config = ConfigDict(extra="forbid")


class CreateWebhook(Body):
    """An endpoint, with its secrets by name."""

    name: str
    url: str
    access_token: str | None = None
    secret: str | None = None


class UpdateWebhook(Body):
    """What is to change of a webhook; what is not sent stays."""

    name: str = ""
    url: str = ""
    access_token: str | None = None
    secret: str | None = None
    enabled: bool = True
    overlap_hours: float = Field(OVERLAP_HOURS, ge=0, le=168)


class TestNew(Body):
    """An endpoint to call before it is saved."""

    name: str | None = None
    url: str
    access_token: str | None = None
    secret: str | None = None
    payload: str | None = None


class TestSaved(Body):
    """What a test sends."""

    payload: str | None = None


class Recover(Body):
    """Since when failed deliveries are to be sent again."""

    since: AwareDatetime


class Scope(Body):
    """Where an automation listens: in a project or in a registry."""

    type: Literal["project", "registry"]
    entity: str | None = None
    project: str | None = None
    registry: str | None = None


class CreateAutomation(Body):
    """What calls which webhook when."""

    name: str
    description: str | None = None
    team: str
    scope: Scope
    event: EventType
    alias_regex: str | None = None
    tag_regex: str | None = None
    run_user: str | None = None
    run_name_regex: str | None = None
    run_states: list[str] | None = None
    metric: MetricRule | None = None
    action_type: Literal["Webhooks"] = "Webhooks"
    webhook_id: str
    payload: str | None = None
    enabled: bool | None = None


class UpdateAutomation(Body):
    """What is to change of an automation; what is not sent stays."""

    name: str = ""
    description: str | None = None
    scope: Scope | None = None
    event: EventType = EventType.LINK_ARTIFACT
    alias_regex: str | None = None
    tag_regex: str | None = None
    run_user: str | None = None
    run_name_regex: str | None = None
    run_states: list[str] | None = None
    metric: MetricRule | None = None
    webhook_id: str = ""
    payload: str | None = None
    enabled: bool | None = None


def own(team: str, caller: Caller) -> Identity:
    """The caller, whose own team the path names."""
    members.require_team(caller, team)
    return caller


def administrator(caller: Annotated[Identity, Depends(own)]) -> Identity:
    """The caller, who administers the team that the path names."""
    caller.require_admin("change or test its webhooks")
    return caller


def one_webhook(webhook_id: str, caller: Annotated[Identity, Depends(own)]) -> Webhook:
    """The webhook that the path names."""
    return webhooks.get(caller, webhook_id)


def once_webhook(webhook_id: str, caller: Annotated[Identity, Depends(own)]) -> str:
    """The id of the webhook that the path names; one that was deleted is known by what it was sent."""
    if deliveries.some(caller, "by_webhook", webhook_id):
        return webhook_id
    return webhooks.get(caller, webhook_id).id


def one_automation(automation_id: str, caller: Caller) -> Automation:
    """The automation that the path names."""
    return automations.get(caller, automation_id)


def once_automation(automation_id: str, caller: Caller) -> str:
    """The id of the automation that the path names; one that was deleted is known by what it fired."""
    if deliveries.some(caller, "by_trigger", automation_id):
        return automation_id
    return automations.get(caller, automation_id).id


def one_delivery(delivery_id: str, caller: Caller) -> Delivery:
    """The delivery that the path names."""
    return deliveries.get(caller, delivery_id)


def own_host(request: Request) -> str:
    """The name of this API, as this request spells it."""
    return request.headers.get("host", "")


Member = Annotated[Identity, Depends(own)]
Admin = Annotated[Identity, Depends(administrator)]
OneWebhook = Annotated[Webhook, Depends(one_webhook)]
OnceWebhook = Annotated[str, Depends(once_webhook)]
OneAutomation = Annotated[Automation, Depends(one_automation)]
OnceAutomation = Annotated[str, Depends(once_automation)]
OneDelivery = Annotated[Delivery, Depends(one_delivery)]
OwnHost = Annotated[str, Depends(own_host)]


@router.post(_WEBHOOKS)
def create_webhook(body: CreateWebhook, caller: Admin, host: OwnHost) -> dict[str, Any]:
    """Make a webhook."""
    return views.webhook(webhooks.create(caller, **body.model_dump(), own_host=host))


@router.get(_WEBHOOKS)
def list_webhooks(
    caller: Member, after: web.After = None, limit: web.Limit = 20, order: web.Order = "asc"
) -> dict[str, Any]:
    """The team's webhooks."""
    rows = webhooks.page(caller.team, after=after, limit=limit + 1, descending=order == "desc")
    return web.page(rows, limit, views.webhook)


@router.post(_WEBHOOKS + "/test")
def test_new_webhook(body: TestNew, caller: Admin, host: OwnHost) -> dict[str, Any]:
    """Call an endpoint before it is saved, and show what it answers."""
    fields = body.model_dump(exclude={"name"})
    return views.test(webhooks.try_out(caller.team, **fields, own_host=host))


@router.get(_WEBHOOKS + "/{webhook_id}")
def get_webhook(webhook: OneWebhook) -> dict[str, Any]:
    """One webhook, and how its endpoint has been doing."""
    return views.webhook(webhook)


@router.patch(_WEBHOOKS + "/{webhook_id}")
def update_webhook(body: UpdateWebhook, webhook: OneWebhook, caller: Admin, host: OwnHost) -> dict[str, Any]:  # noqa: ARG001
    """Change a webhook. Enabling it sends what was held."""
    changes = body.model_dump(exclude_unset=True, exclude={"overlap_hours"})
    changed = webhooks.update(webhook, changes, own_host=host, overlap_hours=body.overlap_hours)
    if changes.get("enabled"):
        deliveries.release(changed, now=clock.now_ms())
    return views.webhook(changed)


@router.delete(_WEBHOOKS + "/{webhook_id}")
def delete_webhook(webhook: OneWebhook, caller: Admin) -> dict[str, Any]:  # noqa: ARG001
    """Delete a webhook that no automation uses."""
    webhooks.delete(webhook)
    return {"id": webhook.id, "object": "webhook", "deleted": True}


@router.post(_WEBHOOKS + "/{webhook_id}/test")
def test_webhook(
    webhook: OneWebhook, caller: Admin, host: OwnHost, body: TestSaved | None = None
) -> dict[str, Any]:
    """Call a webhook's endpoint with its credentials, and show what it answers."""
    answer = webhooks.try_out(
        caller.team,
        url=webhook.url,
        access_token=webhook.access_token,
        secret=webhook.secret,
        payload=body.payload if body else None,
        own_host=host,
    )
    return views.test(answer)


@router.get(_WEBHOOKS + "/{webhook_id}/deliveries")
def list_webhook_deliveries(
    webhook: OnceWebhook, after: web.After = None, limit: web.Limit = 20, order: web.Order = "desc"
) -> dict[str, Any]:
    """The deliveries of a webhook, the newest first; also of one that was deleted."""
    rows = deliveries.page("by_webhook", webhook, after=after, limit=limit + 1, descending=order == "desc")
    return web.page(views.deliveries(rows), limit, dict)


@router.post(_WEBHOOKS + "/{webhook_id}/recover")
def recover_webhook(body: Recover, webhook: OneWebhook, caller: Admin) -> dict[str, Any]:  # noqa: ARG001
    """Send again what failed for good since a moment at most 14 days ago; where there is ``more``, it follows."""
    since = round(body.since.timestamp() * 1000)
    recovered, more = deliveries.recover(webhook, since=since, now=clock.now_ms())
    return {"recovered": recovered, "more": more}


@router.get("/deliveries/{delivery_id}")
def get_delivery(delivery: OneDelivery) -> dict[str, Any]:
    """One delivery: the payload as it is sent, secrets masked, and every attempt."""
    webhook = table.get(Webhook, delivery.webhook_id)
    body = deliveries.body(delivery)
    return views.delivery_in_full(delivery, webhook, deliveries.attempts(delivery), body)


@router.post("/deliveries/{delivery_id}/redeliver")
def redeliver(delivery: OneDelivery, caller: Caller) -> dict[str, Any]:
    """Send a delivery again at once, under the same id."""
    caller.require_admin("send its deliveries again")
    webhook = table.get(Webhook, delivery.webhook_id)
    return views.delivery(deliveries.redeliver(delivery, webhook, now=clock.now_ms()), webhook)


@router.post("/automations")
def create_automation(body: CreateAutomation, caller: Caller) -> dict[str, Any]:
    """Make an automation."""
    members.require_team(caller, body.team)
    scope = _scope(caller, body.scope)
    fields = body.model_dump(exclude={"team", "scope", "action_type"})
    return views.automation(automations.create(caller, scope=scope, fields=_settled(fields)))


@router.get("/automations")
def list_automations(
    caller: Caller,
    project: str | None = None,
    registry: str | None = None,
    event: EventType | None = None,
    webhook_id: str | None = None,
    enabled: bool | None = None,
    after: web.After = None,
    limit: web.Limit = 20,
    order: web.Order = "asc",
) -> dict[str, Any]:
    """The team's automations, of one project, registry, event or webhook where these are named."""
    scope = None
    if project or registry:
        scope = automations.scope_of(caller, entity=None, project=project, registry=registry)
    filters = {"scope": scope, "event": event and event.value, "webhook_id": webhook_id, "enabled": enabled}
    rows = automations.page(
        caller.team, filters=filters, after=after, limit=limit + 1, descending=order == "desc"
    )
    return web.page(rows, limit, views.automation)


@router.get("/automations/{automation_id}")
def get_automation(automation: OneAutomation) -> dict[str, Any]:
    """One automation."""
    return views.automation(automation)


@router.patch("/automations/{automation_id}")
def update_automation(body: UpdateAutomation, automation: OneAutomation, caller: Caller) -> dict[str, Any]:
    """Change an automation."""
    scope = _scope(caller, body.scope) if body.scope else None
    fields = body.model_dump(exclude_unset=True, exclude={"scope"})
    return views.automation(automations.update(caller, automation, scope=scope, fields=_settled(fields)))


@router.delete("/automations/{automation_id}")
def delete_automation(automation: OneAutomation, caller: Caller) -> dict[str, Any]:
    """Delete an automation; its history stays readable."""
    automations.delete(caller, automation)
    return {"id": automation.id, "object": "automation", "deleted": True}


@router.get("/automations/{automation_id}/executions")
def list_executions(
    automation: OnceAutomation, after: web.After = None, limit: web.Limit = 20, order: web.Order = "desc"
) -> dict[str, Any]:
    """What an automation fired, the newest first."""
    rows = deliveries.page("by_trigger", automation, after=after, limit=limit + 1, descending=order == "desc")
    return web.page(views.deliveries(rows), limit, dict)


def _scope(caller: Identity, scope: Scope) -> str:
    wanted = scope.registry if scope.type == "registry" else None
    if scope.type == "registry":
        return automations.scope_of(caller, entity=scope.entity, project=None, registry=wanted or "")
    return automations.scope_of(caller, entity=scope.entity, project=scope.project, registry=None)


def _settled(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with null where it means a default."""
    defaults = {"enabled": True, "run_states": []}
    return {name: defaults.get(name) if value is None else value for name, value in fields.items()}


handler = Mangum(web.create_app("Automations", router), lifespan="off")
