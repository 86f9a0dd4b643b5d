"""From deliveries to POSTs: claimed under a lease, sent side by side, their results written, once for each attempt.

An endpoint's failure is a result and never an exception here, so what is left for the queue's own retries and dead
letters is our bugs alone. A place in flight of the webhook is taken together with the claim and given back together
with the result. What can be asked of the table for many deliveries at once is asked at once.
"""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from boto3.dynamodb.conditions import Attr

from tuneyard import attempts, deliveries, grouped, health, places, queues, table
from tuneyard.attempts import Claimed, Result, Sent
from tuneyard.once import Once
from tuneyard.places import ours
from tuneyard.queues import Ring
from tuneyard.records import ArtifactEvent, Record
from tuneyard.settings import settings
from tuneyard.webhook_records import Automation, Delivery, DeliveryStatus, Webhook

LEASE_MS = 45_000
_BUDGET_SECONDS = 25.0
"""How long one call goes on to take deliveries that wait for the same webhook."""
_TOGETHER_SECONDS = 0.02
"""How long a result waits for those of other endpoints, to be written together with them."""
_PATIENCE_SECONDS = 0.5
"""How long deliveries of one call wait for a place that other calls of this process hold, before they stand in line."""
_MOST_THREADS = 1000


class Ready(NamedTuple):
    """A delivery that may be sent now, with what it takes."""

    ring: Ring
    delivery: Delivery
    webhook: Webhook
    event: ArtifactEvent


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
                    ours.release(claimed.webhook.id, claimed.slot)
            for webhook_id, many in Counter(claimed.webhook.id for claimed, _ in landed).items():
                if webhook_id in self.lines:
                    self._go_on(webhook_id, many)
            self._end_waiting()
        except Exception as error:
            self.failed |= dict.fromkeys([claimed.ring for claimed, _ in landed] + self.todo, error)
            self.todo = []

    def _reserve(self) -> dict[Ring, int]:
        """Those that may try for a place now, each with the one that it tries for."""
        wanted: defaultdict[str, list[Ring]] = defaultdict(list)
        for ring in self.todo:
            if self.full.get(ring.webhook_id) != ours.ended(ring.webhook_id):
                wanted[ring.webhook_id].append(ring)
        boarding: dict[Ring, int] = {}
        for webhook_id, rings in wanted.items():
            boarding |= dict(zip(rings, ours.reserve(webhook_id, places.numbers(), len(rings)), strict=False))
        self.todo = [ring for ring in self.todo if ring not in boarding]
        return boarding

    def _let_go(self, boarding: dict[Ring, int]) -> None:
        """Leave the places to others with which nothing is in the air now."""
        taken = {(claimed.webhook.id, claimed.slot) for claimed in self.flying.values()}
        for ring, number in boarding.items():
            if (ring.webhook_id, number) not in taken:
                ours.release(ring.webhook_id, number)

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
                ours.release(ring.webhook_id, number)
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
            claims.append(Claimed(one.ring, mine, one.webhook, one.event, number))
            writes.append((claim, places.taking(one.webhook.id, number, now=now, until=until)))
        refused = []
        for (one, number), claimed, failure in zip(tried, claims, grouped.transact_each(writes), strict=True):
            if failure is None:
                future = _pool().submit(self._post, claimed)
                self.flying[future] = claimed
                future.add_done_callback(ours.tell)
                continue
            ours.release(one.webhook.id, number, free=0 in failure.failed)
            if 0 not in failure.failed:
                refused.append(one)
        return refused

    def _try_others(self, webhook_id: str, ones: list[Ready]) -> None:
        """Claim deliveries with the places that nobody holds; who finds none waits for one of ours, or in line."""
        numbers = ours.reserve(webhook_id, places.free(webhook_id, self.clock.now()), len(ones))
        refused = self._claim(list(zip(ones, numbers, strict=False))) + ones[len(numbers) :]
        if not refused:
            return
        ended = ours.ended(webhook_id)
        if ours.any(webhook_id):
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
            if not patient or ours.stuck(webhook_id):
                rings = [ring for ring in self.todo if ring.webhook_id == webhook_id]
                self.todo = [ring for ring in self.todo if ring.webhook_id != webhook_id]
                self._stand_in_line(webhook_id, rings)

    def _stand_in_line(self, webhook_id: str, rings: list[Ring]) -> None:
        """Have deliveries wait for a place that others hold, and tell one of those to go on with them."""
        now = self.clock.now()
        places.stand_in_line(rings, now)
        self.lines.discard(webhook_id)
        if not places.tell_a_holder(webhook_id, now):
            self.lines.add(webhook_id)
            self._go_on(webhook_id, len(rings))

    def _landed(self) -> list[tuple[Claimed, Future[Sent]]]:
        """Those that came back, all who do in a moment; none when a place became free, or there was none for long."""
        with ours.waiting():
            if self.todo:
                ours.wait_for(self._anything, _PATIENCE_SECONDS)
            else:
                wait(self.flying, return_when=FIRST_COMPLETED)
            if any(future.done() for future in self.flying):
                wait(self.flying, _TOGETHER_SECONDS)
        return [(self.flying.pop(future), future) for future in list(self.flying) if future.done()]

    def _anything(self) -> bool:
        """Whether something came back, or a delivery to do may find a place now, or should not wait any more."""
        own = {one.webhook.id for one in self.flying.values()}
        return any(future.done() for future in self.flying) or any(
            (id not in own and ours.stuck(id)) or (not ours.all(id) and self.full.get(id) != ours.ended(id))
            for id in {ring.webhook_id for ring in self.todo}
        )

    def _go_on(self, webhook_id: str, most: int) -> None:
        """Take on those who wait the longest in line for a place; when our time is over, another sender is rung."""
        if self.clock.elapsed() < _BUDGET_SECONDS:
            self.todo += self._from_line(webhook_id, most)
        else:
            queues.ring(*self._from_line(webhook_id, 1))
            self.lines.discard(webhook_id)

    def _from_line(self, webhook_id: str, most: int) -> list[Ring]:
        rings = places.from_line(webhook_id, most)
        if not rings:
            self.lines.discard(webhook_id)
        return rings

    def _post(self, claimed: Claimed) -> Sent:
        return attempts.post(claimed, now=self.clock.now())

    def _settle(self, landed: list[tuple[Claimed, Future[Sent]]]) -> None:
        """Write results down, and what follows from them for the webhooks and for when they are tried again."""
        now = self.clock.now()
        results = []
        for claimed, future in landed:
            if isinstance(error := future.exception(), Exception):
                self.failed[claimed.ring] = error
            else:
                results.append(attempts.result(claimed, future.result(), now=now))
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
        failures = grouped.transact_each(_ended(one, unless_told=True) for one in results)
        told = [
            one for one, failure in zip(results, failures, strict=True) if failure and 0 not in failure.failed
        ]
        self.lines |= {one.claimed.webhook.id for one in told}
        failures_then = grouped.transact_each(_ended(one, unless_told=False) for one in told)
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


def _ended(one: Result, *, unless_told: bool) -> tuple[table.Write, ...]:
    place = places.giving_back(one.claimed.webhook.id, one.claimed.slot, unless_told=unless_told)
    return (*one.writes, place)


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
