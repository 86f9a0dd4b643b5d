"""Deliveries: one row for each event and automation that it fired. The row is the queue; messages only ring for it.

Every change of a row names the ``rev`` that it was decided on, so whatever is sent twice or comes late changes nothing.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from boto3.dynamodb.conditions import Attr

from tuneyard import clock, grouped, payloads, queues, table
from tuneyard.errors import Conflict, Invalid, NotFound
from tuneyard.records import ArtifactEvent, Identity
from tuneyard.webhook_records import SHARDS, Attempt, Automation, Delivery, DeliveryStatus, Outcome, Webhook

KEPT_MS = 30 * 24 * 3_600_000
RECOVERABLE_MS = 14 * 24 * 3_600_000
MOST_UNKNOWNS = 8
PIECE = 200
"""Deliveries that one call looks at when many are sent again."""
_OVERDUE_MS = 60_000
_AHEAD_MS = 60_000
_RECOVERED = (
    DeliveryStatus.EXHAUSTED,
    DeliveryStatus.REJECTED,
    DeliveryStatus.HELD,
    DeliveryStatus.PENDING,
)


def id_of(event_id: str, automation_id: str) -> str:
    """The delivery of an event to an automation's webhook: the same whenever it is computed, and its ``webhook-id``."""
    return f"msg_{hashlib.sha256(f'{event_id}/{automation_id}'.encode()).hexdigest()[:32]}"


def get(caller: Identity, delivery_id: str) -> Delivery:
    """The delivery; NotFound when there is none or it is another team's."""
    delivery = table.get(Delivery, delivery_id)
    if delivery is None or delivery.team != caller.team:
        raise NotFound(f"No delivery {delivery_id!r}.")
    return delivery


def page(
    index: Literal["by_webhook", "by_trigger"], owner: str, *, after: str | None, limit: int, descending: bool
) -> list[Delivery]:
    """The deliveries of a webhook or of an automation by time, at most ``limit``."""
    start = None
    if after is not None:
        start = table.get(Delivery, after)
        if start is None or owner != (start.webhook_id if index == "by_webhook" else start.automation_id):
            raise Invalid(
                f"No delivery of this list has the id {after!r}; send the id of one of its rows as `after`.",
                param="after",
            )
    return table.listed(Delivery, index, owner, after=start, limit=limit, descending=descending)


def some(caller: Identity, index: Literal["by_webhook", "by_trigger"], owner: str) -> bool:
    """Whether the team has a delivery of this webhook or automation, which may be deleted by now."""
    newest = table.listed(Delivery, index, owner, limit=1, descending=True)
    return any(delivery.team == caller.team for delivery in newest)


def attempts(delivery: Delivery) -> list[Attempt]:
    """The newest hundred attempts, oldest first; one that nobody lived to report on is among them as unknown."""
    found = table.children(Attempt, delivery.id, limit=100, descending=True)[::-1]
    lost = (delivery.lease_until or 0) < clock.now_ms()
    if delivery.status is DeliveryStatus.ATTEMPTING and lost:
        found.append(unknown(delivery, url=""))
    return found


def body(delivery: Delivery) -> str | None:
    """The body as it is sent, with every secret masked; None when it cannot be made."""
    event = table.get(ArtifactEvent, delivery.event_id)
    if event is None:
        return None
    try:
        return payloads.shown(delivery.template, event, delivery.values).decode()
    except payloads.Unrenderable:
        return None


def moved(delivery: Delivery, **changes: Any) -> tuple[Delivery, table.Put]:
    """The delivery after a change, and the write that makes it, provided that nobody else changed it meanwhile."""
    after = delivery.model_copy(update=changes | {"rev": delivery.rev + 1})
    return after, table.Put(after, when=Attr("rev").eq(delivery.rev))


def move(delivery: Delivery, *more: table.Write, **changes: Any) -> Delivery | None:
    """Change a delivery; None when somebody else changed it first."""
    after, write = moved(delivery, **changes)
    try:
        table.transact(write, *more)
    except table.ConditionFailed:
        return None
    return after


def make_due(delivery: Delivery, *, now: int, wait_ms: int = 0, **changes: Any) -> Delivery | None:
    """Have a delivery sent ``wait_ms`` from now: the row first, then the message, unless it would wait too long."""
    ringable = wait_ms <= queues.LONGEST_DELAY * 1000
    after = move(
        delivery,
        status=DeliveryStatus.PENDING,
        due_at=now + wait_ms,
        rung=ringable,
        lease_until=None,
        claimed_at=None,
        **changes,
    )
    if after is not None and ringable:
        queues.ring(queues.Ring.of(after), delay=-(-wait_ms // 1000))
    return after


def redeliver(delivery: Delivery, webhook: Webhook | None, *, now: int) -> Delivery:
    """Send a delivery again at once under its old id, with the whole schedule before it, whatever became of it."""
    if webhook is None:
        raise Conflict("The webhook of this delivery was deleted, so it cannot be sent again.")
    if not webhook.enabled:
        raise Conflict(f"The webhook {webhook.name!r} is disabled. Enable it first.")
    if table.get(Automation, delivery.automation_id) is None:
        raise Conflict("The automation of this delivery was deleted, so it cannot be sent again.")
    if delivery.status is DeliveryStatus.ATTEMPTING:
        raise Conflict("The delivery is being sent just now. Look at it again in a moment.")
    after = make_due(delivery, now=now, **_AFRESH)
    if after is None:
        raise Conflict("The delivery changed just now. Look at it again, then repeat the request.")
    return after


def release(webhook: Webhook, *, now: int, after: table.Place | None = None) -> int:
    """Send what was held while the webhook was disabled, a piece of it now; how many there were in the piece.

    The next piece is asked for first, so that nothing can be left out.
    """
    held = table.listed(Delivery, "due", webhook.id, after=after, limit=PIECE + 1)
    if len(held) > PIECE:
        queues.send_piece(webhook.id, since=None, after=_place(held[PIECE - 1]))
    return _make_due_each(held[:PIECE], now=now, reason=None)


def recover(webhook: Webhook, *, since: int, now: int, after: table.Place | None = None) -> tuple[int, bool]:
    """Send at once all that failed since a moment at most 14 days ago, a piece of it now.

    How many there were in the piece, and whether there is more, which was asked for first.
    """
    if after is None and not now - RECOVERABLE_MS <= since <= now:
        raise Invalid("Deliveries can be recovered for at most 14 days back.", param="since")
    if not webhook.enabled:
        raise Conflict(f"The webhook {webhook.name!r} is disabled. Enable it first.")
    after = after or table.Place(since - 1, "~")
    found = table.listed(Delivery, "by_webhook", webhook.id, after=after, limit=PIECE + 1)
    more = len(found) > PIECE
    if more:
        queues.send_piece(webhook.id, since=since, after=_place(found[PIECE - 1]))
    lost = [delivery for delivery in found[:PIECE] if delivery.status in _RECOVERED]
    return _make_due_each(lost, now=now, **_AFRESH), more


def go_on(webhook_id: str, *, since: int | None, after: table.Place, now: int) -> None:
    """Send another piece of what was held, or of what failed, unless the webhook was deleted or disabled meanwhile."""
    webhook = table.get(Webhook, webhook_id)
    if webhook is None or not webhook.enabled:
        return
    if since is None:
        release(webhook, now=now, after=after)
    else:
        recover(webhook, since=since, now=now, after=after)


def unknown(delivery: Delivery, *, url: str) -> Attempt:
    """The attempt whose sender was gone before it could say how it ended."""
    return Attempt(
        delivery_id=delivery.id,
        number=delivery.attempts,
        outcome=Outcome.UNKNOWN,
        url=url,
        started_at=delivery.claimed_at or delivery.due_at,
        error="The sender stopped before it could record the result; the request may have arrived.",
        expires=delivery.expires,
    )


def sweep(now: int) -> None:
    """Ring for what is due and was not rung for, or whose message was lost, and take back what a dead sender held.

    Runs every minute or oftener; two at once do no harm.
    """
    for shard in range(SHARDS):
        for delivery in table.due_deliveries(shard, until=now + _AHEAD_MS, limit=1000):
            _look_after(delivery, now)


def take_back(delivery: Delivery, now: int) -> Delivery | None:
    """A delivery whose sender's lease ran out, due again now; the attempt is recorded as unknown."""
    ends = delivery.unknowns + 1 >= MOST_UNKNOWNS
    after = move(
        delivery,
        table.Put(unknown(delivery, url="")),
        status=DeliveryStatus.EXHAUSTED if ends else DeliveryStatus.PENDING,
        reason=f"{MOST_UNKNOWNS} senders stopped in the middle of it." if ends else delivery.reason,
        finished_at=now if ends else None,
        unknowns=delivery.unknowns + 1,
        due_at=now,
        rung=True,
        lease_until=None,
        claimed_at=None,
    )
    return None if ends else after


def _make_due_each(found: list[Delivery], *, now: int, **changes: Any) -> int:
    """Have deliveries sent now: their rows first, then the messages; how many nobody else changed meanwhile."""
    moves = [
        moved(
            delivery,
            status=DeliveryStatus.PENDING,
            due_at=now,
            rung=True,
            lease_until=None,
            claimed_at=None,
            **changes,
        )
        for delivery in found
    ]
    failures = grouped.transact_each([(write,) for _, write in moves])
    due = [after for (after, _), failure in zip(moves, failures, strict=True) if failure is None]
    queues.ring(*(queues.Ring.of(after) for after in due))
    return len(due)


def _place(delivery: Delivery) -> table.Place:
    return table.Place(delivery.created_at, delivery.id)


def _look_after(delivery: Delivery, now: int) -> None:
    if delivery.status is DeliveryStatus.ATTEMPTING:
        if (delivery.lease_until or 0) < now and (mine := take_back(delivery, now)):
            queues.ring(queues.Ring.of(mine))
    elif not delivery.rung:
        make_due(delivery, now=now, wait_ms=max(0, delivery.due_at - now))
    elif delivery.due_at < now - _OVERDUE_MS:
        make_due(delivery, now=now)


_AFRESH: dict[str, Any] = {"failures": 0, "unknowns": 0, "finished_at": None, "reason": None}
