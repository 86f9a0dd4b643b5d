"""What a process makes once is made once, however many threads want it first."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from tuneyard.once import Once


def test_twenty_threads_that_come_first_get_the_same_thing():
    together = threading.Barrier(20)

    @Once
    def thing() -> object:
        """Something."""
        time.sleep(0.05)
        return object()

    def get(_: int) -> object:
        together.wait()
        return thing()

    with ThreadPoolExecutor(20) as pool:
        found = set(pool.map(get, range(20)))
    thing.cache_clear()

    assert len(found) == 1 and thing.__doc__ == "Something."
    assert thing() not in found
