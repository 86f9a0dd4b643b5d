"""What teams use: tokens and seconds by day, project and model, in counters that only ever grow."""

from __future__ import annotations

import threading
from collections import Counter
from datetime import date
from typing import NamedTuple

from tuneyard import clock, table
from tuneyard.errors import Invalid
from tuneyard.records import Identity, Usage


class Line(NamedTuple):
    """Where usage is booked: a day (UTC), a team's project, and a model by the name that it was called by."""

    team: str
    day: str
    project: str
    model: str


def line(team: str, project: str, model: str) -> Line:
    """Today's line."""
    return Line(team, clock.iso(clock.now_ms())[:10], project, model)


def booking(where: Line, **counts: int) -> table.Count:
    """The change that adds to a line's counters, for a transaction or for itself."""
    return table.Count(Usage, tuple(where), add=counts)


def page(
    caller: Identity, *, since: date | None, until: date | None, after: str | None, limit: int
) -> list[Usage]:
    """The team's lines by day, at most ``limit``, from the first day to the last."""
    start: tuple[str, ...] | None = None if since is None else (since.isoformat(), "", "")
    if after is not None:
        start = tuple(after.split("#", 2))
        if len(start) != 3:
            raise Invalid(f"{after!r} is no row of this list; send the id of one as `after`.", param="after")
    rows = table.children(Usage, caller.team, after=start, limit=limit)
    return [row for row in rows if until is None or row.day <= until.isoformat()]


class Ledger:
    """Bookings of a busy process: added up in memory, and written every second by a thread of its own.

    A process that is killed loses the last second of them at most; one that is told to end calls ``close``.
    """

    def __init__(self, seconds: float = 1.0) -> None:
        self._seconds = seconds
        self._lines: dict[Line, Counter[str]] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)
        self._thread.start()

    def book(self, where: Line, **counts: int) -> None:
        """Add to a line."""
        with self._lock:
            self._lines.setdefault(where, Counter()).update(counts)

    def close(self) -> None:
        """Write what is not written yet."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._seconds):
            self._write()
        self._write()

    def _write(self) -> None:
        with self._lock:
            lines, self._lines = self._lines, {}
        for where, counts in lines.items():
            try:
                table.write(booking(where, **counts))
            except Exception:  # the table is out of reach: keep the count for the next time
                self.book(where, **counts)
