"""Which processes were seen doing their part."""

from __future__ import annotations

from typing import Literal

from tuneyard import clock, table
from tuneyard.records import Worker

Kind = Literal["trainer", "sweep", "sender"]
SEEN_FOR_MS = 120_000
_AGAIN_AFTER_MS = 15_000
_written: dict[tuple[str, str], int] = {}


def seen(kind: Kind, name: str) -> None:
    """Write down that a worker is alive now, unless this process wrote it down a moment ago."""
    now = clock.now_ms()
    if now - _written.get((kind, name), 0) < _AGAIN_AFTER_MS:
        return
    _written[kind, name] = now
    table.write(table.Put(Worker(kind=kind, name=name, seen_at=now, expires=now // 1000 + 3600)))


def alive(kind: Kind) -> bool:
    """Whether a worker of this kind was seen in the last two minutes."""
    rows = table.children(Worker, "", limit=1000)
    return any(row.kind == kind and clock.now_ms() - row.seen_at < SEEN_FOR_MS for row in rows)
