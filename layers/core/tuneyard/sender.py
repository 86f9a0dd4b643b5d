"""From a delivery to a POST: claimed under a lease, sent, and its result written, once for each attempt.

An endpoint's failure is a result and never an exception here, so what is left for the queue's own retries and dead
letters is our bugs alone.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import Mapping

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


def send(delivery_id: str, rev: int, *, now: int) -> None:
    """Send a delivery that is due, then those that wait for its webhook, as far as there is time for them.

    A message that is stale, early or repeated does nothing.
    """
    clock = _Clock(now)
    delivery = _current(delivery_id, rev, clock.now())
    if delivery is None:
        return
    webhook = _ready(delivery, clock.now())
    if webhook is None:
        return
    slot = _take_slot(webhook, clock.now())
    if slot is None:
        _wait_for_slot(delivery, clock.now())
        slot = _take_slot(webhook, clock.now())
        if slot is None:
            return
    _work(delivery, webhook, slot, clock)


def _work(first: Delivery, webhook: Webhook, slot: Slot, clock: _Clock) -> None:
    """Send one delivery after the other in one place in flight, until none waits or the time is over."""
    delivery: Delivery | None = first
    while True:
        if delivery is not None:
            _attempt(delivery, webhook, clock)
        waiting = table.children(Waiting, webhook.id, limit=1)
        if not waiting or clock.elapsed() > _BUDGET_SECONDS:
            _give_back(slot)
            waiting = table.children(Waiting, webhook.id, limit=1)
            if waiting:
                _ring_for(waiting[0])
            return
        delivery, ready = _next(waiting[0], clock.now())
        webhook = ready or webhook
        _keep_slot(slot, clock.now())


def _next(waiting: Waiting, now: int) -> tuple[Delivery | None, Webhook | None]:
    """The delivery that waits the longest, taken out of the line, if it is still to be sent."""
    table.write(table.Delete(Waiting, (waiting.webhook_id, waiting.due_at, waiting.delivery_id)))
    delivery = table.get(Delivery, waiting.delivery_id)
    if delivery is None or delivery.status is not DeliveryStatus.PENDING or delivery.due_at > now:
        return None, None
    webhook = _ready(delivery, now)
    return (delivery, webhook) if webhook else (None, None)


def _attempt(delivery: Delivery, webhook: Webhook, clock: _Clock) -> None:
    """Claim, send, and write down what came of it; the claim is what keeps everybody else away."""
    now = clock.now()
    mine = deliveries.move(
        delivery,
        status=DeliveryStatus.ATTEMPTING,
        attempts=delivery.attempts + 1,
        claimed_at=now,
        lease_until=now + LEASE_MS,
    )
    if mine is None:
        return
    event = table.get(ArtifactEvent, mine.event_id)
    if event is None:
        _finish(mine, DeliveryStatus.REJECTED, "The event is older than 30 days and was deleted.", now)
        return
    message = posts.Message(mine.id, mine.attempts, event, mine.template, mine.values)
    try:
        answer = posts.send(webhook, message, now=now)
    except payloads.Unrenderable as error:
        _finish(mine, DeliveryStatus.REJECTED, str(error), now)
        return
    _record(mine, webhook, answer, now=clock.now())


def _record(delivery: Delivery, webhook: Webhook, answer: Answer, *, now: int) -> None:
    verdict = retries.judge(
        answer,
        failures=delivery.failures,
        now=now,
        schedule=settings().webhook_schedule,
        chance=random.random(),
    )
    again = verdict.status is DeliveryStatus.PENDING
    failed = answer.outcome is not Outcome.SUCCEEDED
    ringable = verdict.wait_ms <= queues.LONGEST_DELAY * 1000
    after = deliveries.move(
        delivery,
        table.Put(_attempt_of(delivery, webhook, answer)),
        status=verdict.status,
        reason=verdict.reason,
        failures=delivery.failures + failed,
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


def _current(delivery_id: str, rev: int, now: int) -> Delivery | None:
    """The delivery that a message rings for, if it is due and nobody has changed it since."""
    delivery = table.get(Delivery, delivery_id)
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


def _ready(delivery: Delivery, now: int) -> Webhook | None:
    """The webhook when it takes deliveries now; otherwise the delivery is held, put off or cancelled."""
    webhook = table.get(Webhook, delivery.webhook_id)
    if webhook is None:
        _finish(delivery, DeliveryStatus.CANCELLED, "The webhook was deleted.", now)
    elif table.get(Automation, delivery.automation_id) is None:
        _finish(delivery, DeliveryStatus.CANCELLED, "The automation was deleted.", now)
    elif not webhook.enabled:
        deliveries.move(delivery, status=DeliveryStatus.HELD, reason="The webhook is disabled.")
    elif (webhook.paused_until or 0) > now:
        wait = (webhook.paused_until or 0) - now + round(random.random() * 5000)
        deliveries.make_due(delivery, now=now, wait_ms=wait)
    else:
        return webhook
    return None


def _finish(delivery: Delivery, status: DeliveryStatus, reason: str, now: int) -> None:
    deliveries.move(
        delivery, status=status, reason=reason, finished_at=now, lease_until=None, claimed_at=None
    )


def _take_slot(webhook: Webhook, now: int) -> Slot | None:
    """A place in flight of the webhook, or None when all are taken."""
    most = settings().webhook_in_flight
    taken = {slot.number for slot in table.children(Slot, webhook.id, limit=most) if slot.until > now}
    free = [number for number in range(most) if number not in taken]
    random.shuffle(free)
    for number in free:
        slot = _slot(webhook.id, number, secrets.token_hex(8), now)
        try:
            table.write(table.Put(slot, new=True, when=Attr("until").lte(now)))
        except table.ConditionFailed:
            continue
        return slot
    return None


def _keep_slot(slot: Slot, now: int) -> None:
    kept = _slot(slot.webhook_id, slot.number, slot.holder, now)
    with contextlib.suppress(table.ConditionFailed):
        table.write(table.Put(kept, when=Attr("holder").eq(slot.holder)))


def _give_back(slot: Slot) -> None:
    with contextlib.suppress(table.ConditionFailed):
        table.write(table.Delete(Slot, (slot.webhook_id, slot.number), when=Attr("holder").eq(slot.holder)))


def _slot(webhook_id: str, number: int, holder: str, now: int) -> Slot:
    until = now + LEASE_MS
    return Slot(
        webhook_id=webhook_id, number=number, holder=holder, until=until, expires=until // 1000 + 3600
    )


def _wait_for_slot(delivery: Delivery, now: int) -> None:
    """Stand in line. Whoever gives a place back looks at the line afterwards, and we look for a place: one will see."""
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


def _ring_for(waiting: Waiting) -> None:
    delivery = table.get(Delivery, waiting.delivery_id)
    table.write(table.Delete(Waiting, (waiting.webhook_id, waiting.due_at, waiting.delivery_id)))
    if delivery is not None and delivery.status is DeliveryStatus.PENDING:
        queues.ring(queues.Ring(delivery.id, delivery.rev))


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
