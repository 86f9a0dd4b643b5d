"""From deliveries to POSTs: claimed under a lease, sent side by side, their results written, once for each attempt.

An endpoint's failure is a result and never an exception here, so what is left for the queue's own retries and dead
letters is our bugs alone. A place in flight of the webhook is taken together with the claim and given back together
with the result. What can be asked of the table for many deliveries at once is asked at once.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
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
_PATIENCE_SECONDS = 0.1
"""How long deliveries of one call wait for a place that other calls of this process hold, before they stand in line."""
_STUCK_SECONDS = 0.5
"""When nothing happened at a webhook's places for so long, nobody waits for one outside of the line."""
_MOST_THREADS = 1000
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
    tour = _Tour(rings, now)
    tour.take_off()
    while tour.todo or tour.flying:
        tour.land()
        tour.take_off()
    return tour.failed


class _Ours:
    """The places in flight that this process holds: no use in trying for them, and who needs one is told of its end."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._held: defaultdict[str, set[int]] = defaultdict(set)
        self._ended: Counter[str] = Counter()
        self._moved: dict[str, float] = {}

    def reserve(self, webhook_id: str, among: Iterable[int], most: int) -> list[int]:
        """At most so many of these places that nobody in this process holds or tries for, ours to try for now."""
        with self.changed:
            free = [number for number in among if number not in self._held[webhook_id]][:most]
            self._held[webhook_id].update(free)
            if free:
                self._moved[webhook_id] = time.monotonic()
            return free

    def release(self, webhook_id: str, number: int, *, free: bool = True) -> None:
        """Let others of this process try for a place; not ``free`` when another process was found to hold it."""
        with self.changed:
            self._held[webhook_id].discard(number)
            self._ended[webhook_id] += free
            self._moved[webhook_id] = time.monotonic()
            self.changed.notify_all()

    def ended(self, webhook_id: str) -> int:
        """Counts the places that this process let go of."""
        return self._ended[webhook_id]

    def any(self, webhook_id: str) -> bool:
        """Whether this process holds a place, or tries for one."""
        return bool(self._held[webhook_id])

    def all(self, webhook_id: str) -> bool:
        """Whether this process holds every place."""
        return len(self._held[webhook_id]) >= settings().webhook_in_flight

    def stuck(self, webhook_id: str) -> bool:
        """Whether no place was taken or let go for some time: what is in the air waits for a slow endpoint."""
        return time.monotonic() > self._moved.get(webhook_id, 0.0) + _STUCK_SECONDS

    def tell(self, _: object) -> None:
        """Wake up who waits."""
        with self.changed:
            self.changed.notify_all()


_ours = _Ours()


class _Tour:
    """The deliveries of one call: those in the air, and those to do, which wait for a place in flight."""

    def __init__(self, rings: Iterable[Ring], now: int) -> None:
        self.clock = _Clock(now)
        self.todo = list(dict.fromkeys(rings))
        self.flying: dict[Future[Sent], Claimed] = {}
        self.lines = {ring.webhook_id for ring in self.todo if ring.line}
        """Webhooks with deliveries in line that it is upon us to go on with."""
        self.full: dict[str, int] = {}
        """Webhooks whose other places were found taken, until one of ours ends: how many had ended by then."""
        self.failed: dict[Ring, Exception] = {}
        self.moved_at = 0.0
        """When something of this call took off or landed last, in seconds since it began."""

    def take_off(self) -> None:
        """Send on their way all that are due and find a place in flight."""
        while boarding := self._reserve():
            try:
                self.moved_at = self.clock.elapsed()
                self._board(boarding)
                busy = {one.webhook.id for one in self.flying.values()} | {
                    one.webhook_id for one in self.todo
                }
                for webhook_id in self.lines - busy:
                    self._go_on(webhook_id, settings().webhook_in_flight)
            except BaseException as error:
                self._let_go(boarding)
                if not isinstance(error, Exception):
                    raise
                self.failed |= dict.fromkeys(boarding, error)

    def land(self) -> None:
        """Write down what came back, and go on with what waits in line for its place."""
        landed = self._landed()
        try:
            try:
                self._settle(landed)
            finally:
                for claimed, _ in landed:
                    _ours.release(claimed.webhook.id, claimed.slot)
            for webhook_id, places in Counter(claimed.webhook.id for claimed, _ in landed).items():
                if webhook_id in self.lines:
                    self._go_on(webhook_id, places)
            self._end_waiting()
        except Exception as error:
            self.failed |= dict.fromkeys([claimed.ring for claimed, _ in landed] + self.todo, error)
            self.todo = []

    def _reserve(self) -> dict[Ring, int]:
        """Those that may try for a place now, each with the one that it tries for."""
        wanted: defaultdict[str, list[Ring]] = defaultdict(list)
        for ring in self.todo:
            if self.full.get(ring.webhook_id) != _ours.ended(ring.webhook_id):
                wanted[ring.webhook_id].append(ring)
        boarding: dict[Ring, int] = {}
        for webhook_id, rings in wanted.items():
            boarding |= dict(zip(rings, _ours.reserve(webhook_id, _places(), len(rings)), strict=False))
        self.todo = [ring for ring in self.todo if ring not in boarding]
        return boarding

    def _let_go(self, boarding: dict[Ring, int]) -> None:
        """Leave the places to others with which nothing is in the air now."""
        taken = {(claimed.webhook.id, claimed.slot) for claimed in self.flying.values()}
        for ring, number in boarding.items():
            if (ring.webhook_id, number) not in taken:
                _ours.release(ring.webhook_id, number)

    def _board(self, boarding: dict[Ring, int]) -> None:
        found = grouped.get_each(
            (
                (Delivery, (ring.delivery_id,)),
                (Webhook, (ring.webhook_id,)),
                (Automation, (ring.automation_id,)),
                (ArtifactEvent, (ring.event_id,)),
            )
            for ring in boarding
        )
        now = self.clock.now()
        ready = []
        for (ring, number), records in zip(boarding.items(), found, strict=True):
            one = _ready(ring, now, records)
            if one is None:
                _ours.release(ring.webhook_id, number)
            else:
                ready.append((one, number))
        refused = self._claim(ready)
        for webhook_id in dict.fromkeys(one.webhook.id for one in refused):
            self._try_others(webhook_id, [one for one in refused if one.webhook.id == webhook_id])

    def _claim(self, tried: list[tuple[Ready, int]]) -> list[Ready]:
        """Take deliveries, each with a place in flight; those whose places others have come back."""
        now = self.clock.now()
        until = now + LEASE_MS
        claims, writes = [], []
        for one, number in tried:
            mine, claim = deliveries.moved(
                one.delivery,
                status=DeliveryStatus.ATTEMPTING,
                attempts=one.delivery.attempts + 1,
                claimed_at=now,
                lease_until=until,
            )
            slot = Slot(webhook_id=one.webhook.id, number=number, until=until, expires=until // 1000 + 3600)
            claims.append(Claimed(one.ring, mine, one.webhook, one.event, number))
            writes.append((claim, table.Put(slot, when=~Attr("until").gt(now))))
        refused = []
        for (one, number), claimed, failure in zip(tried, claims, grouped.transact_each(writes), strict=True):
            if failure is None:
                future = _pool().submit(_post, claimed, self.clock)
                self.flying[future] = claimed
                future.add_done_callback(_ours.tell)
                continue
            _ours.release(one.webhook.id, number, free=0 in failure.failed)
            if 0 not in failure.failed:
                refused.append(one)
        return refused

    def _try_others(self, webhook_id: str, ones: list[Ready]) -> None:
        """Claim deliveries with the places that nobody holds; who finds none waits for one of ours, or in line."""
        now, most = self.clock.now(), settings().webhook_in_flight
        taken = {slot.number for slot in table.children(Slot, webhook_id, limit=most) if slot.until > now}
        free = [number for number in _places() if number not in taken]
        numbers = _ours.reserve(webhook_id, free, len(ones))
        refused = self._claim(list(zip(ones, numbers, strict=False))) + ones[len(numbers) :]
        if not refused:
            return
        ended = _ours.ended(webhook_id)
        if _ours.any(webhook_id):
            self.full[webhook_id] = ended
            self.todo += [one.ring for one in refused]
        else:
            self._stand_in_line(webhook_id, [one.ring for one in refused])

    def _end_waiting(self) -> None:
        """Leave deliveries to the line that waited long enough for places of other calls; all of them at our end."""
        if self.clock.elapsed() > _BUDGET_SECONDS:
            queues.ring(*self.todo)
            self.todo = []
            return
        patient = self.clock.elapsed() < self.moved_at + _PATIENCE_SECONDS
        own = {one.webhook.id for one in self.flying.values()}
        for webhook_id in {ring.webhook_id for ring in self.todo} - own:
            if not patient or _ours.stuck(webhook_id):
                rings = [ring for ring in self.todo if ring.webhook_id == webhook_id]
                self.todo = [ring for ring in self.todo if ring.webhook_id != webhook_id]
                self._stand_in_line(webhook_id, rings)

    def _stand_in_line(self, webhook_id: str, rings: list[Ring]) -> None:
        """Have deliveries wait for a place that others hold, and tell one of those to go on with them."""
        now = self.clock.now()
        for start in range(0, len(rings), 100):
            table.transact(*(table.Put(_in_line(ring, now)) for ring in rings[start : start + 100]))
        self.lines.discard(webhook_id)
        if not any(_told_holder(webhook_id, number, now) for number in _places()):
            self.lines.add(webhook_id)
            self._go_on(webhook_id, len(rings))

    def _landed(self) -> list[tuple[Claimed, Future[Sent]]]:
        """Those that came back, all who do in a moment; none when a place became free, or there was none for long."""

        own = {one.webhook.id for one in self.flying.values()}

        def something() -> bool:
            return any(future.done() for future in self.flying) or any(
                (id not in own and _ours.stuck(id))
                or (not _ours.all(id) and self.full.get(id) != _ours.ended(id))
                for id in {ring.webhook_id for ring in self.todo}
            )

        with _ours.changed:
            _ours.changed.wait_for(something, _PATIENCE_SECONDS if self.todo else None)
            if any(future.done() for future in self.flying):
                _ours.changed.wait_for(
                    lambda: all(future.done() for future in self.flying), _TOGETHER_SECONDS
                )
        return [(self.flying.pop(future), future) for future in list(self.flying) if future.done()]

    def _go_on(self, webhook_id: str, most: int) -> None:
        """Take on those who wait the longest in line for a place; when our time is over, another sender is rung."""
        if self.clock.elapsed() < _BUDGET_SECONDS:
            self.todo += self._from_line(webhook_id, most)
        else:
            queues.ring(*self._from_line(webhook_id, 1))
            self.lines.discard(webhook_id)

    def _from_line(self, webhook_id: str, most: int) -> list[Ring]:
        while rows := table.children(Waiting, webhook_id, limit=most):
            failures = grouped.transact_each(
                (table.Delete(Waiting, (webhook_id, row.since, row.delivery_id), when=table.exists()),)
                for row in rows
            )
            taken = [row for row, failure in zip(rows, failures, strict=True) if failure is None]
            if taken:
                return [_ring(row) for row in taken]
        self.lines.discard(webhook_id)
        return []

    def _settle(self, landed: list[tuple[Claimed, Future[Sent]]]) -> None:
        """Write results down, and what follows from them for the webhooks and for when they are tried again."""
        now = self.clock.now()
        results = []
        for claimed, future in landed:
            if isinstance(error := future.exception(), Exception):
                self.failed[claimed.ring] = error
            else:
                results.append(_result(claimed, future.result(), now))
        recorded = self._record(results)
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


def _in_line(ring: Ring, now: int) -> Waiting:
    return Waiting(
        webhook_id=ring.webhook_id,
        since=now,
        delivery_id=ring.delivery_id,
        rev=ring.rev,
        automation_id=ring.automation_id,
        event_id=ring.event_id,
        expires=now // 1000 + 24 * 3600,
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
