"""From a delivery to a POST: claimed under a lease, sent, and its result written, once for each attempt.

An endpoint's failure is a result and never an exception here, so what is left for the queue's own retries and dead
letters is our bugs alone. A place in flight of the webhook is taken together with the claim and given back together
with the result.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from boto3.dynamodb.conditions import Attr

from tuneyard import deliveries, payloads, posts, queues, retries, table, webhooks
from tuneyard.records import ArtifactEvent
from tuneyard.settings import settings
from tuneyard.webhook_records import (
    Answer,
    Attempt,
    Automation,
    Delivery,
    DeliveryStatus,
    Outcome,
    Slot,
    Waiting,
    Webhook,
)

LEASE_MS = 45_000
_BUDGET_SECONDS = 25.0
"""How long one call goes on to take deliveries that wait for the same webhook."""


class Ready(NamedTuple):
    """A delivery that may be sent now, with what it takes."""

    delivery: Delivery
    webhook: Webhook
    event: ArtifactEvent


class Claimed(NamedTuple):
    """A delivery that is ours until its lease ends, in a place in flight."""

    delivery: Delivery
    webhook: Webhook
    event: ArtifactEvent
    slot: int


def send(delivery_id: str, rev: int, *, now: int) -> None:
    """Send a delivery that is due, then those that wait in line for its webhook, as far as there is time for them.

    A message that is stale, early or repeated does nothing.
    """
    clock = _Clock(now)
    delivery = _current(table.get(Delivery, delivery_id), rev, clock.now())
    while delivery is not None:
        ready = _ready(delivery, clock.now())
        if ready is not None:
            claimed = _claim(ready, clock.now())
            if claimed is None:
                return
            _attempt(claimed, clock)
        delivery = _next_in_line(delivery.webhook_id, clock)


def _current(delivery: Delivery | None, rev: int, now: int) -> Delivery | None:
    """The delivery that a message rings for, if it is due and nobody has changed it since."""
    if delivery is None:
        return None
    if delivery.status is DeliveryStatus.ATTEMPTING and (delivery.lease_until or 0) < now:
        return deliveries.take_back(delivery, now)
    if delivery.rev != rev or delivery.status is not DeliveryStatus.PENDING:
        return None
    if delivery.due_at > now + 1000:
        queues.ring(queues.Ring(delivery.id, delivery.rev, -(-(delivery.due_at - now) // 1000)))
        return None
    return delivery


def _ready(delivery: Delivery, now: int) -> Ready | None:
    """The delivery with what it takes to send it now; otherwise it is held, put off, or at its end."""
    webhook, automation, event = table.get_many(
        (Webhook, (delivery.webhook_id,)),
        (Automation, (delivery.automation_id,)),
        (ArtifactEvent, (delivery.event_id,)),
    )
    if not isinstance(webhook, Webhook):
        _finish(delivery, DeliveryStatus.CANCELLED, "The webhook was deleted.", now)
    elif automation is None:
        _finish(delivery, DeliveryStatus.CANCELLED, "The automation was deleted.", now)
    elif not isinstance(event, ArtifactEvent):
        _finish(delivery, DeliveryStatus.REJECTED, "The event is older than 30 days and was deleted.", now)
    elif not webhook.enabled:
        deliveries.move(delivery, status=DeliveryStatus.HELD, reason="The webhook is disabled.")
    elif (webhook.paused_until or 0) > now:
        wait = (webhook.paused_until or 0) - now + round(random.random() * 5000)
        deliveries.make_due(delivery, now=now, wait_ms=wait)
    else:
        return Ready(delivery, webhook, event)
    return None


def _claim(ready: Ready, now: int) -> Claimed | None:
    """Take a delivery and a place in flight at once; None when others have it, or it must wait in line for a place."""
    mine, claim = deliveries.moved(
        ready.delivery,
        status=DeliveryStatus.ATTEMPTING,
        attempts=ready.delivery.attempts + 1,
        claimed_at=now,
        lease_until=now + LEASE_MS,
    )
    for number in _places(ready.delivery, now):
        until = now + LEASE_MS
        slot = Slot(webhook_id=mine.webhook_id, number=number, until=until, expires=until // 1000 + 3600)
        try:
            table.transact(claim, table.Put(slot, new=True, when=Attr("until").lte(now)))
        except table.ConditionFailed as error:
            if 0 in error.failed:
                return None
            continue
        return Claimed(mine, ready.webhook, ready.event, number)
    return None


def _places(delivery: Delivery, now: int) -> Iterator[int]:
    """Places in flight to try: any one, then those that are free; then, standing in line, those that are free by now.

    Whoever gives a place back looks at the line afterwards, and who stands in line looks for a place: one will see.
    """
    yield random.randrange(settings().webhook_in_flight)
    yield from _free_places(delivery.webhook_id, now)
    table.write(
        table.Put(
            Waiting(
                webhook_id=delivery.webhook_id,
                due_at=delivery.due_at,
                delivery_id=delivery.id,
                expires=now // 1000 + 24 * 3600,
            )
        )
    )
    yield from _free_places(delivery.webhook_id, now)


def _free_places(webhook_id: str, now: int) -> list[int]:
    most = settings().webhook_in_flight
    taken = {slot.number for slot in table.children(Slot, webhook_id, limit=most) if slot.until > now}
    return [number for number in range(most) if number not in taken]


def _attempt(claimed: Claimed, clock: _Clock) -> None:
    """Send, and write down what came of it."""
    delivery = claimed.delivery
    message = posts.Message(delivery.id, delivery.attempts, claimed.event, delivery.template, delivery.values)
    try:
        answer = posts.send(claimed.webhook, message, now=clock.now())
    except payloads.Unrenderable as error:
        _finish(delivery, DeliveryStatus.REJECTED, str(error), clock.now(), _give_back(claimed))
        return
    _record(claimed, answer, now=clock.now())


def _record(claimed: Claimed, answer: Answer, *, now: int) -> None:
    delivery, webhook = claimed.delivery, claimed.webhook
    verdict = retries.judge(
        answer,
        failures=delivery.failures,
        now=now,
        schedule=settings().webhook_schedule,
        chance=random.random(),
    )
    again = verdict.status is DeliveryStatus.PENDING
    ringable = verdict.wait_ms <= queues.LONGEST_DELAY * 1000
    after = deliveries.move(
        delivery,
        table.Put(_attempt_of(delivery, webhook, answer)),
        _give_back(claimed),
        status=verdict.status,
        reason=verdict.reason,
        failures=delivery.failures + (answer.outcome is not Outcome.SUCCEEDED),
        last_status=answer.status_code,
        due_at=now + verdict.wait_ms if again else delivery.due_at,
        rung=ringable,
        finished_at=None if again else now,
        lease_until=None,
        claimed_at=None,
    )
    _note_health(webhook, answer, verdict, now)
    if after is not None and again and ringable:
        queues.ring(queues.Ring(after.id, after.rev, -(-verdict.wait_ms // 1000)))


def _give_back(claimed: Claimed) -> table.Delete:
    """The write that frees the place in flight, for the transaction that ends the attempt."""
    return table.Delete(Slot, (claimed.webhook.id, claimed.slot))


def _next_in_line(webhook_id: str, clock: _Clock) -> Delivery | None:
    """The delivery that waits the longest for a place of a webhook; when our time is over, another sender is rung."""
    while waiting := next(iter(table.children(Waiting, webhook_id, limit=1)), None):
        table.write(table.Delete(Waiting, (webhook_id, waiting.due_at, waiting.delivery_id)))
        delivery = table.get(Delivery, waiting.delivery_id)
        if delivery is None or delivery.status is not DeliveryStatus.PENDING or delivery.due_at > clock.now():
            continue
        if clock.elapsed() < _BUDGET_SECONDS:
            return delivery
        queues.ring(queues.Ring(delivery.id, delivery.rev))
        return None
    return None


def _attempt_of(delivery: Delivery, webhook: Webhook, answer: Answer) -> Attempt:
    return Attempt(
        delivery_id=delivery.id,
        number=delivery.attempts,
        outcome=answer.outcome,
        url=webhook.url,
        started_at=delivery.claimed_at or delivery.due_at,
        duration_ms=answer.duration_ms,
        status_code=answer.status_code,
        headers=answer.headers,
        body=answer.body.decode(errors="replace"),
        error=answer.error,
        expires=delivery.expires,
    )


def _note_health(webhook: Webhook, answer: Answer, verdict: retries.Verdict, now: int) -> None:
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


def _finish(delivery: Delivery, status: DeliveryStatus, reason: str, now: int, *more: table.Write) -> None:
    deliveries.move(
        delivery, *more, status=status, reason=reason, finished_at=now, lease_until=None, claimed_at=None
    )


class _Clock:
    """The time of a call: what it was told, and what went by since."""

    def __init__(self, now: int) -> None:
        self.began, self.told = time.monotonic(), now

    def elapsed(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self.began

    def now(self) -> int:
        """Milliseconds since 1970."""
        return self.told + round(self.elapsed() * 1000)
