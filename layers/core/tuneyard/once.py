"""What a process makes once and keeps: clients of AWS, the TLS context."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
_making = threading.RLock()
"""One for all, since clients of AWS share a session, which bears no two threads that make one."""


class Once(Generic[T]):
    """Calls a function at its first use, and once only however many threads come at the same time.

    ``functools.lru_cache`` would let every one of them make a client of its own, a tenth of a second each.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self.make, self.__doc__ = make, make.__doc__
        self._made: list[T] = []

    def __call__(self) -> T:
        """What the function returned."""
        if not self._made:
            with _making:
                if not self._made:
                    self._made.append(self.make())
        return self._made[0]

    def cache_clear(self) -> None:
        """Make it anew at its next use."""
        self._made = []
