"""How members, secrets, webhooks, automations and deliveries look on the wire: no secret is in any of it."""

from __future__ import annotations

from typing import Any

from tuneyard import clock, table
from tuneyard.clock import iso
from tuneyard.records import REGISTRY_PROJECT, ApiKey, Member
from tuneyard.webhook_records import (
    Answer,
    Attempt,
    Automation,
    Delivery,
    DeliveryStatus,
    Outcome,
    Secret,
    Webhook,
)


def member(record: Member) -> dict[str, Any]:
    """A member of a team; the ``id`` in a list is the user's name."""
    scopes = [grant.partition(":") for grant in record.admin_of]
    return {
        "id": record.user,
        "object": "team.member",
        "user": record.user,
        "role": record.role,
        "admin_of": [{"type": kind, kind: name} for kind, _, name in scopes],
        "created_at": iso(record.created_at),
    }


def api_key(record: ApiKey) -> dict[str, Any]:
    """A key, without the key."""
    return {
        "id": record.id,
        "object": "team.api_key",
        "name": record.name,
        "user": record.user,
        "role": record.role,
        "created_at": iso(record.created_at),
        "revoked_at": _moment(record.revoked_at),
    }


def secret(record: Secret) -> dict[str, Any]:
    """A secret, without its value; the ``id`` in a list is its name."""
    return {
        "id": record.name,
        "object": "team.secret",
        "name": record.name,
        "used_by_webhooks": record.as_token + record.as_secret,
        "created_at": iso(record.created_at),
        "created_by": record.created_by,
        "updated_at": iso(record.updated_at),
    }


def webhook(record: Webhook) -> dict[str, Any]:
    """A webhook, and how its endpoint has been doing lately."""
    paused = record.paused_until if (record.paused_until or 0) > clock.now_ms() else None
    return {
        "id": record.id,
        "object": "webhook",
        "team": record.team,
        "name": record.name,
        "url": record.url,
        "access_token": record.access_token,
        "secret": record.secret,
        "enabled": record.enabled,
        "disabled_at": _moment(record.disabled_at),
        "disabled_reason": record.disabled_reason,
        "failures_since_success": record.failures,
        "last_success_at": _moment(record.last_success_at),
        "paused_until": _moment(paused),
        "automations": record.automations,
        "created_at": iso(record.created_at),
        "created_by": record.created_by,
        "updated_at": iso(record.updated_at),
    }


def automation(record: Automation) -> dict[str, Any]:
    """An automation, as it was sent."""
    return {
        "id": record.id,
        "object": "automation",
        "name": record.name,
        "description": record.description,
        "team": record.team,
        "scope": scope(record.scope),
        "event": record.event,
        "alias_regex": record.alias_regex,
        "tag_regex": record.tag_regex,
        "run_user": record.run_user,
        "run_name_regex": record.run_name_regex,
        "run_states": record.run_states,
        "metric": None if record.metric is None else record.metric.model_dump(mode="json"),
        "action_type": "Webhooks",
        "webhook_id": record.webhook_id,
        "payload": record.payload,
        "enabled": record.enabled,
        "created_at": iso(record.created_at),
        "created_by": record.created_by,
        "updated_at": iso(record.updated_at),
    }


def scope(path: str) -> dict[str, str]:
    """A scope as a client names it."""
    entity, _, project = path.partition("/")
    if project.startswith(REGISTRY_PROJECT):
        return {"type": "registry", "registry": project.removeprefix(REGISTRY_PROJECT)}
    return {"type": "project", "entity": entity, "project": project}


def deliveries(records: list[Delivery]) -> list[dict[str, Any]]:
    """Deliveries as a list shows them; what is pending for a disabled webhook is held."""
    hooks = {id: table.get(Webhook, id) for id in {record.webhook_id for record in records}}
    return [delivery(record, hooks[record.webhook_id]) for record in records]


def delivery(record: Delivery, of: Webhook | None) -> dict[str, Any]:
    """A delivery without its attempts."""
    held = record.status is DeliveryStatus.PENDING and of is not None and not of.enabled
    status = DeliveryStatus.HELD if held else record.status
    return {
        "id": record.id,
        "object": "delivery",
        "status": status,
        "event": {"id": record.event_id, "type": record.event_type},
        "webhook_id": record.webhook_id,
        "automation_id": record.automation_id,
        "attempt_count": record.attempts,
        "status_code": record.last_status,
        "reason": record.reason,
        "next_attempt_at": iso(record.due_at) if status is DeliveryStatus.PENDING else None,
        "created_at": iso(record.created_at),
        "finished_at": _moment(record.finished_at),
    }


def delivery_in_full(
    record: Delivery, of: Webhook | None, attempts: list[Attempt], body: str | None
) -> dict[str, Any]:
    """A delivery with its body as it is sent, its secrets masked, and every attempt."""
    return delivery(record, of) | {"payload": body, "attempts": [attempt(one) for one in attempts]}


def attempt(record: Attempt) -> dict[str, Any]:
    """One attempt, with the head of the answer."""
    return {
        "number": record.number,
        "outcome": record.outcome,
        "status_code": record.status_code,
        "url": record.url or None,
        "started_at": iso(record.started_at),
        "duration_ms": record.duration_ms,
        "headers": _headers(record.headers),
        "body": record.body,
        "error": record.error,
    }


def test(answer: Answer) -> dict[str, Any]:
    """What a test of a webhook came to."""
    error = None
    if answer.outcome is not Outcome.SUCCEEDED:
        error = {"kind": answer.outcome.removesuffix("_error"), "message": answer.error}
    return {
        "delivered": error is None,
        "status_code": answer.status_code,
        "headers": _headers(answer.headers),
        "body": answer.body.decode(errors="replace"),
        "duration_ms": answer.duration_ms,
        "error": error,
    }


def _headers(pairs: list[tuple[str, str]]) -> dict[str, str]:
    shown: dict[str, str] = {}
    for name, value in pairs:
        key = name.lower()
        shown[key] = f"{shown[key]}, {value}" if key in shown else value
    return shown


def _moment(ms: int | None) -> str | None:
    return None if ms is None else iso(ms)
