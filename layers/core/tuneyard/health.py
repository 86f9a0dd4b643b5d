"""How a webhook's endpoint does: counted after every attempt, and what follows from it for the webhook."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from boto3.dynamodb.conditions import Attr

from tuneyard import grouped, retries, table, webhooks
from tuneyard.webhook_records import Answer, Outcome, Webhook


def note(found: list[tuple[Webhook, Answer, retries.Verdict]], now: int) -> None:
    """Count for webhooks how they do; pause one after time-outs in a row, disable it when it is gone or hopeless.

    What came in at the same moment is counted at once, and a success among it comes last.
    """
    well = []
    webhooks_by_id = {webhook.id: webhook for webhook, _, _ in found}
    for id, webhook in webhooks_by_id.items():
        mine = [(answer, verdict) for other, answer, verdict in found if other.id == id]
        failed = [answer for answer, _ in mine if answer.outcome is not Outcome.SUCCEEDED]
        if any(verdict.gone for _, verdict in mine):
            webhooks.disable(webhook, "The endpoint answered 410: it is gone for good.", now=now)
            continue
        if failed:
            late = sum(answer.outcome is Outcome.TIMEOUT for answer in failed)
            _failed(webhook, len(failed), late, now)
        known = now - (webhook.last_success_at or 0) < 60_000 and not webhook.failures and not failed
        if len(failed) < len(mine) and not known:
            well.append(webhook)
    healthy = {"last_success_at": now, "failures": 0, "timeouts": 0, "failing_since": None}
    grouped.transact_each((_change(webhook, set=healthy),) for webhook in well)


def _failed(webhook: Webhook, many: int, late: int, now: int) -> None:
    since = {} if webhook.failing_since else {"failing_since": now}
    _update(
        webhook,
        set=since if late == many else since | {"timeouts": 0},
        add={"failures": many} | ({"timeouts": late} if late == many else {}),
    )
    fresh = table.get(Webhook, webhook.id)
    if fresh is None:
        return
    if fresh.timeouts >= retries.TIMEOUTS_BEFORE_PAUSE:
        _update(fresh, set={"paused_until": now + retries.PAUSE_MS})
    if reason := retries.why_disable(fresh, now):
        webhooks.disable(fresh, reason, now=now)


def _update(webhook: Webhook, *, set: Mapping[str, int | None], add: dict[str, int] | None = None) -> None:
    with contextlib.suppress(table.ConditionFailed):
        table.write(_change(webhook, set=set, add=add))


def _change(
    webhook: Webhook, *, set: Mapping[str, int | None], add: dict[str, int] | None = None
) -> table.Update:
    """The write that notes something on a webhook, unless it is gone or was enabled anew meanwhile."""
    same = Attr("enabled_at").eq(webhook.enabled_at)
    return table.Update(Webhook, (webhook.id,), set=dict(set), add=add or {}, when=same)
