"""Key-value memory by rows: what each row holds, and how one conversation's beginning serves the next.

A row that is no longer running keeps what it read. A new prompt starts from the longest beginning that any row shares
with it (the same adapter, the same tokens): copying it is tens of times cheaper than reading it again.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from .sampling import KNOBS


class Rows:
    """The static memory (layers, 2, N, Hkv, L, d) and one line of bookkeeping for each of its N rows."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.count, self.context = memory.shape[2], memory.shape[4]
        self.held = np.zeros((self.count, self.context), np.int32)
        """The tokens a row has read, or is about to: the prompt is written here on admission."""
        self.promised = np.zeros(self.count, np.int64)
        self.filled = np.zeros(self.count, np.int64)
        """How many of them have their keys and values in memory."""
        self.owner = np.full(self.count, "", object)
        """The id of the adapter that read them; "" is the base model."""
        self.last = np.zeros(self.count, np.int64)
        self.knobs = np.zeros(self.count, KNOBS)
        self.used = np.zeros(self.count, np.int64)
        self._lines = (self.held, self.promised, self.filled, self.owner, self.last, self.knobs, self.used)

    def match(self, owner: str, prompt: np.ndarray) -> tuple[int, int, int]:
        """The row that holds most of the prompt's beginning, how much of it, and how much a row will hold soon."""
        same = self.held[:, : len(prompt)] == prompt
        lengths = np.where(same.all(1), len(prompt), same.argmin(1)) * (self.owner == owner)
        ready = np.minimum(lengths, self.filled)
        row = int(ready.argmax())
        return row, int(ready[row]), int(np.minimum(lengths, self.promised).max())

    def begin(self, row: int, owner: str, prompt: np.ndarray, *, source: int, shared: int) -> None:
        """Give the row a new prompt, of which the first ``shared`` tokens are taken from row ``source``."""
        self.held[row, : len(prompt)] = prompt
        self.promised[row], self.owner[row] = len(prompt), owner
        self.take(row, source, shared)

    def take(self, row: int, source: int, shared: int) -> None:
        """Fill the row with the first ``shared`` tokens of row ``source``."""
        if source != row and shared:
            self._copy(source, row, shared)
        self.filled[row] = shared

    def place(self, free: list[int], source: int, shared: int) -> tuple[int, int]:
        """Choose and clear one of the ``free`` rows; the row to use, and where ``source`` is now.

        Continuing a conversation takes its own row; else the row that was used longest ago is forgotten.
        """
        place = min(free)
        if source in free and shared >= self.filled[source] - 1:
            self.swap(place, source)
            return place, place
        others = [row for row in free if row != source] or free
        oldest = others[int(self.used[others].argmin())]
        if oldest != place:
            self._copy(place, oldest, int(self.filled[place]))
            for line in self._lines:
                line[oldest] = line[place]
            source = oldest if source == place else source
        return place, source

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows with all they hold."""
        if a == b:
            return
        size = int(max(self.filled[a], self.filled[b]))
        if size:
            kept = self.memory[:, :, a, :, :size].clone()
            self.memory[:, :, a, :, :size] = self.memory[:, :, b, :, :size]
            self.memory[:, :, b, :, :size] = kept
        for line in self._lines:
            line[[a, b]] = line[[b, a]]

    def _copy(self, source: int, target: int, size: int) -> None:
        self.memory[:, :, target, :, :size] = self.memory[:, :, source, :, :size]

    def abandon(self, row: int) -> None:
        """The row will read no more than it has."""
        self.promised[row] = self.filled[row]

    def clear(self, row: int) -> None:
        """Wipe what a row holds: numbers that are not finite would reach whoever has the row next, masked or not."""
        self.memory[:, :, row, :, : int(self.filled[row]) + 1].zero_()
        self.filled[row] = 0

    def forget(self) -> None:
        """Drop everything that is held."""
        self.promised[:] = self.filled[:] = self.used[:] = 0
