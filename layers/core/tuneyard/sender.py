"""From a delivery to a POST: claimed under a lease, sent, and its result written, once for each attempt.

An endpoint's failure is a result and never an exception here, so what is left for the queue's own retries and dead
letters is our bugs alone. A place in flight of the webhook is taken together with the claim and given back together
with the result.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from boto3.dynamodb.conditions import Attr

from tuneyard import deliveries, grouped, health, payloads, posts, queues, retries, table
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


def send(ring: queues.Ring, *, now: int) -> None:
    """Send a delivery that is due, then those that wait in line for its webhook, as far as there is time for them.

    A message that is stale, early or repeated does nothing.
    """
    clock = _Clock(now)
    line = ring.line
    next_ring: queues.Ring | None = ring
    while next_ring is not None:
        ready = _ready(next_ring, clock.now())
        if ready is not None:
            claimed = _claim(ready, clock.now())
            if claimed is None:
                return
            line = _attempt(claimed, clock) or line
        next_ring = _next_in_line(ring.webhook_id, clock) if line else None


def _ready(ring: queues.Ring, now: int) -> Ready | None:
    """The delivery with what it takes to send it now; otherwise it is nobody's, or held, put off, at its end."""
    found, webhook, automation, event = grouped.get_many(
        (Delivery, (ring.delivery_id,)),
        (Webhook, (ring.webhook_id,)),
        (Automation, (ring.automation_id,)),
        (ArtifactEvent, (ring.event_id,)),
    )
    delivery = _current(found, ring, now) if isinstance(found, Delivery) else None
    if delivery is None:
        return None
    if not isinstance(webhook, Webhook):
        _finish(delivery, DeliveryStatus.CANCELLED, "The webhook was deleted.", now)
    elif automation is None:
        _finish(delivery, DeliveryStatus.CANCELLED, "The automation was deleted.", now)
    elif not isinstance(event, ArtifactEvent):
        _finish(delivery, DeliveryStatus.REJECTED, "The event is older than 30 days and was deleted.", now)
    elif not webhook.enabled:
        still = table.Check(Webhook, (webhook.id,), when=Attr("enabled").eq(False))
        deliveries.move(delivery, still, status=DeliveryStatus.HELD, reason="The webhook is disabled.")
    elif (webhook.paused_until or 0) > now:
        wait = (webhook.paused_until or 0) - now + round(random.random() * 5000)
        deliveries.make_due(delivery, now=now, wait_ms=wait)
    else:
        return Ready(delivery, webhook, event)
    return None


def _current(delivery: Delivery, ring: queues.Ring, now: int) -> Delivery | None:
    """The delivery that a message rings for, if it is due and nobody has changed it since."""
    if delivery.status is DeliveryStatus.ATTEMPTING and (delivery.lease_until or 0) < now:
        return deliveries.take_back(delivery, now)
    if delivery.rev != ring.rev or delivery.status is not DeliveryStatus.PENDING:
        return None
    if delivery.due_at > now + 1000:
        queues.ring(ring, delay=-(-(delivery.due_at - now) // 1000))
        return None
    return delivery


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
            grouped.transact(claim, table.Put(slot, new=True, when=Attr("until").lte(now)))
        except table.ConditionFailed as error:
            if 0 in error.failed:
                return None
            continue
        return Claimed(mine, ready.webhook, ready.event, number)
    return None


def _places(delivery: Delivery, now: int) -> Iterator[int]:
    """Places in flight to try: any one, then those that are free; at last it stands in line, and tells a holder so."""
    most = settings().webhook_in_flight
    numbers = random.sample(range(most), most)
    yield numbers[0]
    slots = table.children(Slot, delivery.webhook_id, limit=most)
    taken = {slot.number for slot in slots if slot.until > now}
    yield from (number for number in numbers if number not in taken)
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
    for number in numbers:
        if _told_holder(delivery.webhook_id, number, now):
            return
        yield number


def _told_holder(webhook_id: str, number: int, now: int) -> bool:
    """Whether the holder of a place will go on with the line; False when the place is free by now."""
    held = Attr("until").gt(now)
    try:
        table.write(table.Update(Slot, (webhook_id, number), set={"line": True}, when=held))
    except table.ConditionFailed:
        return False
    return True


def _attempt(claimed: Claimed, clock: _Clock) -> bool:
    """Send, and write down what came of it; whether somebody waits in line."""
    delivery = claimed.delivery
    message = posts.Message(delivery.id, delivery.attempts, claimed.event, delivery.template, delivery.values)
    try:
        answer = posts.send(claimed.webhook, message, now=clock.now())
    except payloads.Unrenderable as error:
        rejected = {"status": DeliveryStatus.REJECTED, "reason": str(error), "finished_at": clock.now()}
        return _settle(claimed, rejected)[1]
    return _record(claimed, answer, now=clock.now())


def _record(claimed: Claimed, answer: Answer, *, now: int) -> bool:
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
    changes = {
        "status": verdict.status,
        "reason": verdict.reason,
        "failures": delivery.failures + (answer.outcome is not Outcome.SUCCEEDED),
        "last_status": answer.status_code,
        "due_at": now + verdict.wait_ms if again else delivery.due_at,
        "rung": ringable,
        "finished_at": None if again else now,
    }
    after, line = _settle(claimed, changes, table.Put(_attempt_of(delivery, webhook, answer)))
    health.note(webhook, answer, verdict, now)
    if after is not None and again and ringable:
        queues.ring(queues.Ring.of(after), delay=-(-verdict.wait_ms // 1000))
    return line


def _settle(claimed: Claimed, changes: dict[str, Any], *more: table.Write) -> tuple[Delivery | None, bool]:
    """End an attempt and give its place back, at once; None when the claim was lost. And whether somebody waits."""
    after, write = deliveries.moved(claimed.delivery, lease_until=None, claimed_at=None, **changes)
    place = (claimed.webhook.id, claimed.slot)
    try:
        grouped.transact(write, table.Delete(Slot, place, when=Attr("line").not_exists()), *more)
        return after, False
    except table.ConditionFailed as error:
        if 0 in error.failed:
            return None, False
    try:
        grouped.transact(write, table.Delete(Slot, place), *more)
    except table.ConditionFailed:
        return None, True
    return after, True


def _next_in_line(webhook_id: str, clock: _Clock) -> queues.Ring | None:
    """The delivery that waits the longest for a place of a webhook; when our time is over, another sender is rung."""
    while waiting := next(iter(table.children(Waiting, webhook_id, limit=1)), None):
        table.write(table.Delete(Waiting, (webhook_id, waiting.due_at, waiting.delivery_id)))
        delivery = table.get(Delivery, waiting.delivery_id)
        if delivery is None or delivery.status is not DeliveryStatus.PENDING or delivery.due_at > clock.now():
            continue
        ring = queues.Ring.of(delivery, line=True)
        if clock.elapsed() < _BUDGET_SECONDS:
            return ring
        queues.ring(ring)
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
