"""The places in flight of webhooks: which ones this process holds, and the line of who waits for those of others.

A place is taken with the claim of a delivery, by the condition that nobody holds it, and ends with its lease at the
latest. Who finds every place taken stands in line, and tells a holder to go on with the line.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

from boto3.dynamodb.conditions import Attr

from tuneyard import grouped, table
from tuneyard.queues import Ring
from tuneyard.settings import settings
from tuneyard.webhook_records import Slot, Waiting

_STUCK_SECONDS = 0.5
"""When nothing happened at a webhook's places for so long, nobody waits for one outside of the line."""


class Ours:
    """The places in flight that this process holds: no use in trying for them, and who needs one is told of its end."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiters = 0
        """Calls of the sender that have nothing to do but to wait for endpoints."""
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

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Be one of the ``waiters``."""
        with self.changed:
            self.waiters += 1
        try:
            yield
        finally:
            with self.changed:
                self.waiters -= 1

    def wait_for(self, what: Callable[[], bool], seconds: float) -> None:
        """Wait until something is so, at most so long, looking again at whatever this process does."""
        with self.changed:
            self.changed.wait_for(what, seconds)

    def tell(self, _: object) -> None:
        """Wake up who waits."""
        with self.changed:
            self.changed.notify_all()


ours = Ours()


def numbers() -> list[int]:
    """The places in flight of a webhook, in any order."""
    return random.sample(range(settings().webhook_in_flight), settings().webhook_in_flight)


def free(webhook_id: str, now: int) -> list[int]:
    """The places that nobody holds, in any order."""
    taken = _taken(webhook_id, now)
    return [number for number in numbers() if number not in taken]


def taking(webhook_id: str, number: int, *, now: int, until: int) -> table.Put:
    """The write that takes a place, provided that nobody holds it."""
    slot = Slot(webhook_id=webhook_id, number=number, until=until, expires=until // 1000 + 3600)
    return table.Put(slot, when=~Attr("until").gt(now))


def giving_back(webhook_id: str, number: int, *, unless_told: bool) -> table.Delete:
    """The write that gives a place back, ``unless_told`` that it is upon its holder to go on with the line."""
    return table.Delete(Slot, (webhook_id, number), when=Attr("line").not_exists() if unless_told else None)


def stand_in_line(rings: list[Ring], now: int) -> None:
    """Have deliveries wait for a place that others hold."""
    for start in range(0, len(rings), 100):
        table.transact(*(table.Put(_in_line(ring, now)) for ring in rings[start : start + 100]))


def tell_a_holder(webhook_id: str, now: int) -> bool:
    """Have one of those who hold a place go on with the line; False when every place is free by now."""
    return any(_told(webhook_id, number, now) for number in _taken(webhook_id, now))


def from_line(webhook_id: str, most: int) -> list[Ring]:
    """Take those out of the line who wait the longest; none when nobody waits."""
    while rows := table.children(Waiting, webhook_id, limit=most):
        failures = grouped.transact_each(
            (table.Delete(Waiting, (webhook_id, row.since, row.delivery_id), when=table.exists()),)
            for row in rows
        )
        taken = [row for row, failure in zip(rows, failures, strict=True) if failure is None]
        if taken:
            return [_ring(row) for row in taken]
    return []


def _taken(webhook_id: str, now: int) -> set[int]:
    held = table.children(Slot, webhook_id, limit=settings().webhook_in_flight)
    return {slot.number for slot in held if slot.until > now}


def _told(webhook_id: str, number: int, now: int) -> bool:
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
