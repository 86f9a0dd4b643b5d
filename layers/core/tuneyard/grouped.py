"""Many things asked of the table in one call, those of several threads too: it answers thirty as soon as one.

Each is granted or refused on its own, as if it were alone. A thread that finds nobody at work works for all who wait,
itself included; who comes meanwhile is in the next call. Alone it waits for nobody.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from tuneyard import table
from tuneyard.records import Record

MOST_WRITES, MOST_READS = 90, 100
Identity = tuple[type[Record], tuple[Any, ...]]
W = TypeVar("W")
A = TypeVar("A")


class _Wish(Generic[W, A]):
    """What one thread wants, and what came of it."""

    def __init__(self, wanted: W) -> None:
        self.wanted, self.turn = wanted, threading.Event()
        self.answer: A | None = None
        self.error: BaseException | None = None
        self.done = False


class _Group(Generic[W, A]):
    """Wishes that wait, and at most one thread that works for them."""

    def __init__(
        self, choose: Callable[[list[_Wish[W, A]]], int], work: Callable[[list[_Wish[W, A]]], None]
    ) -> None:
        self._choose, self._work = choose, work
        self._lock, self._busy = threading.Lock(), False
        self._waiting: list[_Wish[W, A]] = []

    def ask(self, wanted: Iterable[W]) -> list[_Wish[W, A]]:
        """Have wishes worked on by whoever works, or by ourselves; what failed for all in a call is raised."""
        mine = [_Wish[W, A](one) for one in wanted]
        if not mine:
            return []
        with self._lock:
            self._waiting += mine
            leads = not self._busy
            self._busy = True
        if leads:
            mine[0].turn.set()
        for wish in mine:
            wish.turn.wait()
            if not wish.done:
                self._lead()
        for wish in mine:
            if wish.error is not None and not isinstance(wish.error, table.ConditionFailed):
                raise wish.error
        return mine

    def _lead(self) -> None:
        """Work for the first who wait, then hand over to the next."""
        with self._lock:
            number = self._choose(self._waiting)
            taken, self._waiting = self._waiting[:number], self._waiting[number:]
        try:
            self._work(taken)
        except BaseException as error:
            for wish in taken:
                wish.error = wish.error if wish.done else error
        with self._lock:
            heir = self._waiting[0] if self._waiting else None
            self._busy = heir is not None
        for wish in taken:
            wish.done = True
            wish.turn.set()
        if heir is not None:
            heir.turn.set()


def get_each(wanted: Iterable[tuple[Identity, ...]]) -> list[list[Record | None]]:
    """What ``table.get_many`` answers, for each of these."""
    return [wish.answer or [] for wish in _reads.ask(wanted)]


def transact_each(wanted: Iterable[tuple[table.Write, ...]]) -> list[table.ConditionFailed | None]:
    """What ``table.transact`` does, for each of these: all of its changes or none, whatever becomes of the others.

    For each comes back what its conditions failed by, or None when it was made.
    """
    return [wish.error for wish in _writes.ask(wanted)]  # type: ignore[misc]


def _read(wishes: list[_Wish[tuple[Identity, ...], list[Record | None]]]) -> None:
    keys = list(dict.fromkeys(key for wish in wishes for key in wish.wanted))
    found = dict(zip(keys, table.get_many(*keys), strict=True))
    for wish in wishes:
        wish.answer = [found[key] for key in wish.wanted]


def _write(wishes: list[_Wish[tuple[table.Write, ...], None]]) -> None:
    """Make all changes by one transaction; whose conditions do not hold is left out, and the rest tried again."""
    left = wishes
    while left:
        try:
            table.transact(*(change for wish in left for change in wish.wanted))
            return
        except table.ConditionFailed as error:
            place, kept = 0, []
            for wish in left:
                failed = [one - place for one in error.failed if place <= one < place + len(wish.wanted)]
                place += len(wish.wanted)
                if failed:
                    wish.error, wish.done = table.ConditionFailed(failed), True
                else:
                    kept.append(wish)
            left = kept


def _together(most: int, keys: Callable[[Any], list[Any]], *, apart: bool) -> Callable[[list[Any]], int]:
    """How many of the first wishes fit in one call; ``apart``: none of them may name what another names."""

    def choose(waiting: list[Any]) -> int:
        seen: set[Any] = set()
        for number, wish in enumerate(waiting):
            named = keys(wish.wanted)
            if number and (len(seen.union(named)) > most or (apart and not seen.isdisjoint(named))):
                return number
            seen.update(named)
        return len(waiting)

    return choose


_reads: _Group[tuple[Identity, ...], list[Record | None]] = _Group(
    _together(MOST_READS, list, apart=False), _read
)
_writes: _Group[tuple[table.Write, ...], None] = _Group(
    _together(MOST_WRITES, lambda changes: [table.place_of(one) for one in changes], apart=True), _write
)
