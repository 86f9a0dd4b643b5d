"""How a webhook's endpoint does: counted after every attempt, and what follows from it for the webhook."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from boto3.dynamodb.conditions import Attr

from tuneyard import retries, table, webhooks
from tuneyard.webhook_records import Answer, Outcome, Webhook


def note(webhook: Webhook, answer: Answer, verdict: retries.Verdict, now: int) -> None:
    """Count for the webhook how it does; pause it after time-outs in a row, disable it when it is gone or hopeless."""
    if answer.outcome is Outcome.SUCCEEDED:
        told = now - (webhook.last_success_at or 0) < 60_000 and not webhook.failures
        if not told:
            well = {"last_success_at": now, "failures": 0, "timeouts": 0, "failing_since": None}
            _update(webhook, set=well)
        return
    if verdict.gone:
        webhooks.disable(webhook, "The endpoint answered 410: it is gone for good.", now=now)
        return
    late = answer.outcome is Outcome.TIMEOUT
    since = {} if webhook.failing_since else {"failing_since": now}
    _update(
        webhook,
        set=since if late else since | {"timeouts": 0},
        add={"failures": 1} | ({"timeouts": 1} if late else {}),
    )
    fresh = table.get(Webhook, webhook.id)
    if fresh is None:
        return
    if fresh.timeouts >= retries.TIMEOUTS_BEFORE_PAUSE:
        _update(fresh, set={"paused_until": now + retries.PAUSE_MS})
    if reason := retries.why_disable(fresh, now):
        webhooks.disable(fresh, reason, now=now)


def _update(webhook: Webhook, *, set: Mapping[str, int | None], add: dict[str, int] | None = None) -> None:
    """Note something on a webhook, unless it is gone or was enabled anew meanwhile."""
    same = Attr("enabled_at").eq(webhook.enabled_at)
    with contextlib.suppress(table.ConditionFailed):
        table.write(table.Update(Webhook, (webhook.id,), set=dict(set), add=add or {}, when=same))
