"""Webhooks: a team's endpoints, with the secrets that they authenticate and sign with."""

from __future__ import annotations

from collections import Counter
from typing import Any

from boto3.dynamodb.conditions import Attr

from tuneyard import clock, guard, ids, payloads, posts, table
from tuneyard.credentials import OVERLAP_HOURS, attached
from tuneyard.errors import Conflict, Invalid, NotFound
from tuneyard.jobs import publish
from tuneyard.records import ArtifactEvent, EventType, Identity
from tuneyard.webhook_records import Answer, Outcome, Secret, Webhook

_HEALTHY: dict[str, Any] = {
    "enabled": True,
    "disabled_at": None,
    "disabled_reason": None,
    "failing_since": None,
    "failures": 0,
    "timeouts": 0,
    "paused_until": None,
}


def create(
    caller: Identity, *, name: str, url: str, access_token: str | None, secret: str | None, own_host: str
) -> Webhook:
    """Make a webhook; Invalid when its URL may not be called or a secret is not there."""
    _check(name, url, own_host)
    webhook = _new(caller.team, name, url, access_token, secret, by=caller.user)
    _write(table.Put(webhook, new=True), caller.team, before=(None, None), after=(access_token, secret))
    return webhook


def get(caller: Identity, webhook_id: str) -> Webhook:
    """The webhook; NotFound when there is none or it is another team's."""
    webhook = table.get(Webhook, webhook_id)
    if webhook is None or webhook.team != caller.team:
        raise NotFound(f"No webhook {webhook_id!r}.")
    return webhook


def page(team: str, *, after: str | None, limit: int, descending: bool) -> list[Webhook]:
    """The team's webhooks in order of creation, at most ``limit``."""
    start = None
    if after is not None:
        start = table.get(Webhook, after)
        if start is None or start.team != team:
            raise Invalid(
                f"No webhook has the id {after!r}; send the id of a row of this list as `after`.",
                param="after",
            )
    return table.listed(Webhook, "by_team", team, after=start, limit=limit, descending=descending)


def update(
    webhook: Webhook, changes: dict[str, Any], *, own_host: str, overlap_hours: float = OVERLAP_HOURS
) -> Webhook:
    """Change name, URL, secrets or ``enabled``; pending deliveries go by the webhook as it is then.

    A secret that is replaced by another signs as well for ``overlap_hours``. Enabling forgets earlier failures.
    """
    changed = webhook.model_copy(update=changes)
    _check(changed.name, changed.url, own_host)
    now = clock.now_ms()
    settled: dict[str, Any] = changes | {"updated_at": now}
    if "access_token" in changes:
        settled["access_token_id"] = _id_of(webhook.team, changed.access_token)
    if "secret" in changes:
        settled["secret_id"] = _id_of(webhook.team, changed.secret)
    if webhook.secret and changed.secret and changed.secret != webhook.secret:
        until = now + round(overlap_hours * 3_600_000)
        settled |= {"previous_secret_id": webhook.secret_id, "previous_until": until}
    if changes.get("enabled") is True and not webhook.enabled:
        settled |= _HEALTHY | {"enabled_at": now}
    if changes.get("enabled") is False and webhook.enabled:
        settled |= {"disabled_at": now, "disabled_reason": "It was disabled by hand."}
    unchanged = Attr("rev").eq(webhook.rev)
    change = table.Update(Webhook, (webhook.id,), set=settled, add={"rev": 1}, when=unchanged)
    _write(
        change,
        webhook.team,
        before=(webhook.access_token, webhook.secret),
        after=(changed.access_token, changed.secret),
    )
    return table.get(Webhook, webhook.id) or changed


def delete(webhook: Webhook) -> None:
    """Delete a webhook that no automation uses; what is still to be delivered is cancelled."""
    unused = Attr("rev").eq(webhook.rev) & Attr("automations").eq(0)
    try:
        _write(
            table.Delete(Webhook, (webhook.id,), when=unused),
            webhook.team,
            before=(webhook.access_token, webhook.secret),
            after=(None, None),
        )
    except Conflict as error:
        raise Conflict(
            f"Automations use the webhook {webhook.name!r}. Delete them, or give them another webhook, first."
        ) from error


def try_out(
    team: str, *, url: str, access_token: str | None, secret: str | None, payload: str | None, own_host: str
) -> Answer:
    """Call an endpoint for real with these credentials, and tell what it answered; nothing is stored.

    A payload is filled with the values of an example; without one the body is ``{}``.
    """
    _check_url(url, own_host)
    if payload is not None:
        payloads.check(payload, secret=secret)
    webhook = _new(team, "test", url, access_token, secret, by="")
    event = example(team, webhook.created_at)
    message = posts.Message(f"msg_test_{ids.new()}", 1, event, "{}" if payload is None else payload, {})
    try:
        return posts.send(webhook, message, now=webhook.created_at)
    except payloads.Unrenderable as error:
        return Answer(outcome=Outcome.BLOCKED, error=str(error))


def example(team: str, now: int) -> ArtifactEvent:
    """The event whose values fill the payload of a test."""
    return ArtifactEvent(
        id=ids.new(),
        type=EventType.WEBHOOK_TEST,
        entity=team,
        project="my-project",
        author="someone",
        collection=f"{team}/my-project/my-model",
        version=3,
        version_name="step3",
        alias="production",
        tag="candidate",
        metadata={"reward": 0.75},
        created_at=now,
    )


def disable(webhook: Webhook, reason: str, *, now: int) -> None:
    """Stop sending, and tell so by one event: only one of those who find a reason at the same time does it."""
    told = disabled(webhook, reason, now=now)
    change = {"enabled": False, "disabled_at": now, "disabled_reason": reason}
    still = Attr("enabled").eq(True) & Attr("enabled_at").eq(webhook.enabled_at)
    try:
        table.transact(
            table.Update(Webhook, (webhook.id,), set=change, add={"rev": 1}, when=still),
            table.Put(told, new=True),
        )
    except table.ConditionFailed:
        return
    publish(told)


def disabled(webhook: Webhook, reason: str, *, now: int) -> ArtifactEvent:
    """The event that a webhook was disabled: for rules on the bus, since no automation can listen to it."""
    return ArtifactEvent(
        id=ids.new(),
        type=EventType.WEBHOOK_DISABLED,
        entity=webhook.team,
        project="",
        author="",
        created_at=now,
        data={"webhook_id": webhook.id, "name": webhook.name, "url": webhook.url, "reason": reason},
    )


def _new(team: str, name: str, url: str, token: str | None, secret: str | None, *, by: str) -> Webhook:
    now = clock.now_ms()
    return Webhook(
        id=ids.new(),
        team=team,
        name=name,
        url=url,
        access_token=token,
        access_token_id=_id_of(team, token),
        secret=secret,
        secret_id=_id_of(team, secret),
        created_at=now,
        created_by=by,
        updated_at=now,
        enabled_at=now,
    )


def _id_of(team: str, secret: str | None) -> str | None:
    return None if secret is None else attached(team, secret).id


def _check(name: str, url: str, own_host: str) -> None:
    if not 1 <= len(name) <= 128 or not payloads.is_text(name) or name != name.strip():
        raise Invalid("A webhook's name has 1 to 128 characters.", param="name")
    _check_url(url, own_host)


def _check_url(url: str, own_host: str) -> None:
    try:
        guard.target(url, own_hosts=(own_host,))
    except guard.Blocked as error:
        raise Invalid(f"The URL {url[:200]!r} cannot be used: {error}.", param="url") from error


def _write(
    change: table.Put | table.Update | table.Delete,
    team: str,
    *,
    before: tuple[str | None, str | None],
    after: tuple[str | None, str | None],
) -> None:
    """Change a webhook, and count it in the secrets it begins or ceases to use: those cannot be deleted meanwhile."""
    uses = _uses(after)
    uses.subtract(_uses(before))
    writes: list[table.Write] = [change]
    names = sorted({name for (name, _), n in uses.items() if n})
    for name in names:
        add = {how: uses[name, how] for how in ("as_token", "as_secret") if uses[name, how]}
        fits = Attr("fits_header").eq(True) if add.get("as_token", 0) > 0 else table.exists()
        writes.append(table.Update(Secret, (team, name), add=add, when=fits))
    try:
        table.transact(*writes)
    except table.ConditionFailed as error:
        wrong = [place for place in error.failed if place > 0]
        if not wrong:
            raise
        secret = attached(team, names[wrong[0] - 1])
        raise Invalid(
            f"The secret {secret.name!r} cannot be an access token: its value has characters that a header cannot "
            "carry.",
            param="access_token",
        ) from error


def _uses(names: tuple[str | None, str | None]) -> Counter[tuple[str, str]]:
    token, secret = names
    return Counter(
        {(name, how): 1 for name, how in ((token, "as_token"), (secret, "as_secret")) if name is not None}
    )
