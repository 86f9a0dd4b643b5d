"""From deliveries to POSTs: claimed under a lease, sent side by side, their results written, once for each attempt.

An endpoint's failure is a result and never an exception here, so what is left for the queue's own retries and dead
letters is our bugs alone. A place in flight of the webhook is taken together with the claim and given back together
with the result. What can be asked of the table for many deliveries at once is asked at once.
"""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from boto3.dynamodb.conditions import Attr

from tuneyard import deliveries, grouped, health, payloads, posts, queues, retries, table
from tuneyard.once import Once
from tuneyard.queues import Ring
from tuneyard.records import ArtifactEvent, Record
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
_TOGETHER_SECONDS = 0.02
"""How long a result waits for those of other endpoints, to be written together with them."""
_MOST_THREADS = 1000
_ours: set[tuple[str, int]] = set()
"""The places in flight that this process holds, by webhook and number: no use in trying for them."""
Sent = Answer | payloads.Unrenderable


class Ready(NamedTuple):
    """A delivery that may be sent now, with what it takes."""

    ring: Ring
    delivery: Delivery
    webhook: Webhook
    event: ArtifactEvent


class Claimed(NamedTuple):
    """A delivery that is ours until its lease ends, in a place in flight."""

    ring: Ring
    delivery: Delivery
    webhook: Webhook
    event: ArtifactEvent
    slot: int


class Result(NamedTuple):
    """What came of an attempt, the delivery as it is afterwards, and the writes that make it so."""

    claimed: Claimed
    after: Delivery
    writes: list[table.Put]
    answer: Answer | None = None
    verdict: retries.Verdict | None = None


def send(*rings: Ring, now: int) -> dict[Ring, Exception]:
    """Send deliveries that are due, then those that wait in line for their webhooks, as far as there is time for them.

    A message that is stale, early or repeated does nothing. Those that we failed at come back, with what went wrong.
    """
    tour = _Tour(now)
    todo = list(dict.fromkeys(rings))
    while todo or tour.flying:
        tour.take_off(todo)
        todo = tour.land() if tour.flying else []
    return tour.failed


class _Tour:
    """The deliveries of one call: those in the air, and those that wait until one of the same webhook has landed."""

    def __init__(self, now: int) -> None:
        self.clock = _Clock(now)
        self.flying: dict[Future[Sent], Claimed] = {}
        self.waiting: dict[str, list[Ring]] = defaultdict(list)
        self.lines: set[str] = set()
        """Webhooks with deliveries in line that it is upon us to go on with."""
        self.failed: dict[Ring, Exception] = {}

    def take_off(self, rings: list[Ring]) -> None:
        """Send on their way all that are due and find a place in flight."""
        self.lines |= {ring.webhook_id for ring in rings if ring.line}
        while rings:
            try:
                self._board(rings)
                idle = {ring.webhook_id for ring in rings} & self.lines
                rings = [
                    ring
                    for webhook_id in idle
                    if not self._holds_place(webhook_id)
                    for ring in self._from_line(webhook_id, settings().webhook_in_flight)
                ]
            except Exception as error:
                self.failed |= dict.fromkeys(rings, error)
                return

    def land(self) -> list[Ring]:
        """Write down what came back; what may take off in its place."""
        landed = self._landed()
        try:
            self._settle(landed)
            room = Counter(claimed.webhook.id for claimed, _ in landed)
            return [ring for webhook_id, places in room.items() for ring in self._next(webhook_id, places)]
        except Exception as error:
            self.failed |= {claimed.ring: error for claimed, _ in landed}
            return [ring for claimed, _ in landed for ring in self.waiting.pop(claimed.webhook.id, [])]

    def _board(self, rings: list[Ring]) -> None:
        found = grouped.get_each(
            (
                (Delivery, (ring.delivery_id,)),
                (Webhook, (ring.webhook_id,)),
                (Automation, (ring.automation_id,)),
                (ArtifactEvent, (ring.event_id,)),
            )
            for ring in rings
        )
        now = self.clock.now()
        read = [_ready(ring, now, records) for ring, records in zip(rings, found, strict=True)]
        refused = self._claim([one for one in read if one is not None], self._likely_places)
        refused = self._claim(refused, self._free_places)
        for webhook_id in dict.fromkeys(one.webhook.id for one in refused):
            self._put_off(webhook_id, [one for one in refused if one.webhook.id == webhook_id])

    def _claim(self, ready: list[Ready], places: Callable[[str], list[int]]) -> list[Ready]:
        """Take deliveries, and a place in flight for each; those that found no place come back."""
        now = self.clock.now()
        until = now + LEASE_MS
        numbers = {webhook_id: places(webhook_id) for webhook_id in {one.webhook.id for one in ready}}
        tried, refused = [], []
        for one in ready:
            if not numbers[one.webhook.id]:
                refused.append(one)
                continue
            number = numbers[one.webhook.id].pop()
            mine, claim = deliveries.moved(
                one.delivery,
                status=DeliveryStatus.ATTEMPTING,
                attempts=one.delivery.attempts + 1,
                claimed_at=now,
                lease_until=until,
            )
            slot = Slot(webhook_id=one.webhook.id, number=number, until=until, expires=until // 1000 + 3600)
            free = table.Put(slot, when=~Attr("until").gt(now))
            tried.append((one, Claimed(one.ring, mine, one.webhook, one.event, number), (claim, free)))
        taken = {(one.webhook.id, claimed.slot) for one, claimed, _ in tried}
        _ours.update(taken)
        try:
            failures = grouped.transact_each(writes for _, _, writes in tried)
        except BaseException:
            _ours.difference_update(taken)
            raise
        for (one, claimed, _), failure in zip(tried, failures, strict=True):
            if failure is not None:
                _ours.discard((one.webhook.id, claimed.slot))
            if failure is None:
                self.flying[_pool().submit(_post, claimed, self.clock)] = claimed
            elif 0 not in failure.failed:
                refused.append(one)
        return refused

    def _likely_places(self, webhook_id: str) -> list[int]:
        """The places that this process does not hold, in any order."""
        return [number for number in _places() if (webhook_id, number) not in _ours]

    def _free_places(self, webhook_id: str) -> list[int]:
        """The places that nobody holds."""
        now = self.clock.now()
        slots = table.children(Slot, webhook_id, limit=settings().webhook_in_flight)
        taken = {slot.number for slot in slots if slot.until > now}
        return [number for number in self._likely_places(webhook_id) if number not in taken]

    def _holds_place(self, webhook_id: str) -> bool:
        return any(claimed.webhook.id == webhook_id for claimed in self.flying.values())

    def _put_off(self, webhook_id: str, ones: list[Ready]) -> None:
        """Have deliveries wait for a place: for one of ours, or in line for one of others, who are told of it."""
        if self._holds_place(webhook_id):
            self.waiting[webhook_id] += [one.ring for one in ones]
            return
        expires = self.clock.now() // 1000 + 24 * 3600
        table.transact(*(table.Put(_in_line(one, expires)) for one in ones))
        self.lines.discard(webhook_id)
        for number in _places():
            if _told_holder(webhook_id, number, self.clock.now()):
                return
            self._claim(ones[:1], lambda _, free=number: [free])  # type: ignore[misc]
            if self._holds_place(webhook_id):
                self.lines.add(webhook_id)
                return

    def _landed(self) -> list[tuple[Claimed, Future[Sent]]]:
        """Those that came back: all who do in this moment, and at least one."""
        done, _ = wait(self.flying, timeout=_TOGETHER_SECONDS)
        if not done:
            done, _ = wait(self.flying, return_when=FIRST_COMPLETED)
        return [(self.flying.pop(future), future) for future in done]

    def _settle(self, landed: list[tuple[Claimed, Future[Sent]]]) -> None:
        """Write results down, and what follows from them for the webhooks and for when they are tried again."""
        now = self.clock.now()
        results = []
        for claimed, future in landed:
            if isinstance(error := future.exception(), Exception):
                self.failed[claimed.ring] = error
            else:
                results.append(_result(claimed, future.result(), now))
        try:
            recorded = self._record(results)
        finally:
            _ours.difference_update((claimed.webhook.id, claimed.slot) for claimed, _ in landed)
        health.note(
            [(one.claimed.webhook, one.answer, one.verdict) for one in results if one.answer and one.verdict],
            now,
        )
        again = [
            (one.after, one.verdict)
            for one in recorded
            if one.verdict and one.after.status is DeliveryStatus.PENDING
        ]
        queues.ring_each(
            [(Ring.of(after), -(-verdict.wait_ms // 1000)) for after, verdict in again if after.rung]
        )

    def _record(self, results: list[Result]) -> list[Result]:
        """End attempts and give their places back, at once; those whose claims were not lost come back."""
        unless = Attr("line").not_exists()
        failures = grouped.transact_each(
            (*one.writes, table.Delete(Slot, (one.claimed.webhook.id, one.claimed.slot), when=unless))
            for one in results
        )
        told = [
            one for one, failure in zip(results, failures, strict=True) if failure and 0 not in failure.failed
        ]
        self.lines |= {one.claimed.webhook.id for one in told}
        failures_then = grouped.transact_each(
            (*one.writes, table.Delete(Slot, (one.claimed.webhook.id, one.claimed.slot))) for one in told
        )
        recorded = [one for one, failure in zip(results, failures, strict=True) if failure is None]
        return recorded + [one for one, failure in zip(told, failures_then, strict=True) if failure is None]

    def _next(self, webhook_id: str, places: int) -> list[Ring]:
        """What goes on in places that were given back; when our time is over, another sender is rung for it."""
        rings = self.waiting.pop(webhook_id, [])
        if self.clock.elapsed() < _BUDGET_SECONDS:
            if webhook_id in self.lines and len(rings) < places:
                rings += self._from_line(webhook_id, places - len(rings))
            return rings
        if webhook_id in self.lines:
            rings += self._from_line(webhook_id, 1)
            self.lines.discard(webhook_id)
        queues.ring(*rings)
        return []

    def _from_line(self, webhook_id: str, most: int) -> list[Ring]:
        """Those who wait the longest for a place of a webhook, taken out of the line."""
        while rows := table.children(Waiting, webhook_id, limit=most):
            failures = grouped.transact_each(
                (table.Delete(Waiting, (webhook_id, row.due_at, row.delivery_id), when=table.exists()),)
                for row in rows
            )
            taken = [row for row, failure in zip(rows, failures, strict=True) if failure is None]
            if taken:
                return [_ring(row) for row in taken]
        self.lines.discard(webhook_id)
        return []


def _ready(ring: Ring, now: int, found: list[Record | None]) -> Ready | None:
    """The delivery with what it takes to send it now; otherwise it is nobody's, or held, put off, at its end."""
    row, webhook, automation, event = found
    delivery = _current(row, ring, now) if isinstance(row, Delivery) else None
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
        return Ready(ring, delivery, webhook, event)
    return None


def _current(delivery: Delivery, ring: Ring, now: int) -> Delivery | None:
    """The delivery that a message rings for, if it is due and nobody has changed it since."""
    if delivery.status is DeliveryStatus.ATTEMPTING and (delivery.lease_until or 0) < now:
        return deliveries.take_back(delivery, now)
    if delivery.rev != ring.rev or delivery.status is not DeliveryStatus.PENDING:
        return None
    if delivery.due_at > now + 1000:
        queues.ring(ring, delay=-(-(delivery.due_at - now) // 1000))
        return None
    return delivery


def _places() -> list[int]:
    """The places in flight of a webhook, in any order."""
    return random.sample(range(settings().webhook_in_flight), settings().webhook_in_flight)


def _told_holder(webhook_id: str, number: int, now: int) -> bool:
    """Whether the holder of a place will go on with the line; False when the place is free by now."""
    held = Attr("until").gt(now)
    try:
        table.write(table.Update(Slot, (webhook_id, number), set={"line": True}, when=held))
    except table.ConditionFailed:
        return False
    return True


def _in_line(one: Ready, expires: int) -> Waiting:
    delivery = one.delivery
    return Waiting(
        webhook_id=delivery.webhook_id,
        due_at=delivery.due_at,
        delivery_id=delivery.id,
        rev=delivery.rev,
        automation_id=delivery.automation_id,
        event_id=delivery.event_id,
        expires=expires,
    )


def _ring(row: Waiting) -> Ring:
    return Ring(row.delivery_id, row.rev, row.webhook_id, row.automation_id, row.event_id, line=True)


def _post(claimed: Claimed, clock: _Clock) -> Sent:
    delivery = claimed.delivery
    message = posts.Message(delivery.id, delivery.attempts, claimed.event, delivery.template, delivery.values)
    try:
        return posts.send(claimed.webhook, message, now=clock.now())
    except payloads.Unrenderable as error:
        return error


def _result(claimed: Claimed, sent: Sent, now: int) -> Result:
    delivery = claimed.delivery
    if isinstance(sent, payloads.Unrenderable):
        after, write = deliveries.moved(
            delivery,
            status=DeliveryStatus.REJECTED,
            reason=str(sent),
            finished_at=now,
            lease_until=None,
            claimed_at=None,
        )
        return Result(claimed, after, [write])
    verdict = retries.judge(
        sent,
        failures=delivery.failures,
        now=now,
        schedule=settings().webhook_schedule,
        chance=random.random(),
    )
    again = verdict.status is DeliveryStatus.PENDING
    after, write = deliveries.moved(
        delivery,
        status=verdict.status,
        reason=verdict.reason,
        failures=delivery.failures + (sent.outcome is not Outcome.SUCCEEDED),
        last_status=sent.status_code,
        due_at=now + verdict.wait_ms if again else delivery.due_at,
        rung=verdict.wait_ms <= queues.LONGEST_DELAY * 1000,
        finished_at=None if again else now,
        lease_until=None,
        claimed_at=None,
    )
    attempt = _attempt_of(delivery, claimed.webhook, sent)
    return Result(claimed, after, [write, table.Put(attempt)], sent, verdict)


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


@Once
def _pool() -> ThreadPoolExecutor:
    """Threads for requests: as many as there are requests in the air, kept for the next ones."""
    return ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="post")


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
