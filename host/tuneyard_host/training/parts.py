"""A step in parts: shared out over the processes of a job, and smaller where a whole row does not fit the memory.

A row's histories are independent of each other but for what they share, so any slice of them is a row of its own; its
loss, divided by the counts of the whole, adds up with the others' to the loss of the whole, and so does its gradient.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from tuneyard.errors import TrainingError
from tuneyard_host.training import world
from tuneyard_host.training.packing import History, Row, build_row

T = TypeVar("T")


class Part(NamedTuple):
    """Some of a row's histories as a row, and which of the whole row's (M,) trained tokens are theirs, in order."""

    row: Row
    where: Tensor


class Scored(NamedTuple):
    """log p and entropy of a row's (M,) trained tokens, put together from its parts."""

    logprobs: Tensor
    entropies: Tensor

    @classmethod
    def of_size(cls, tokens: int, device: torch.device) -> Scored:
        """Room for so many tokens."""
        return cls(torch.zeros(tokens, device=device), torch.zeros(tokens, device=device))

    def fill(self, part: Part, logprobs: Tensor, entropies: Tensor) -> None:
        """Put in what a part has computed."""
        self.logprobs[part.where], self.entropies[part.where] = logprobs.detach(), entropies.detach()

    def added_up(self) -> Scored:
        """With what the other processes computed."""
        world.add_up(*self)
        return self


def whole(row: Row) -> Part:
    """The row as its only part."""
    return Part(row, torch.ones(row.num_trained, dtype=torch.bool, device=row.targets.device))


def split(part: Part, ways: int) -> list[Part]:
    """At most ``ways`` slices of a part's histories, of about equal numbers of tokens; none is empty."""
    row = part.row
    ends = [*accumulate(len(h.ids) - shared for h, shared in zip(row.histories, row.shared, strict=True))]
    targets = [ends[-1] * way / ways for way in range(1, ways)]
    nearest = {min(range(len(ends)), key=lambda at: abs(ends[at] - target)) + 1 for target in targets}
    cuts = sorted({0, len(ends)} | nearest)
    parts = []
    for first, last in pairwise(cuts):
        theirs = (row.history >= first) & (row.history < last)
        where = torch.zeros_like(part.where)
        where[part.where] = theirs
        slice_ = build_row(row.histories[first:last], [0, *row.shared[first + 1 : last]])
        parts.append(Part(slice_.to(row.ids.device), where))
    return parts


class Room:
    """How much of a row fits the memory at once: all, until a job has learnt otherwise."""

    def __init__(self) -> None:
        self.most: int | None = None
        """Tokens; None while nothing was too long."""

    def parts(self, row: Row) -> list[Part]:
        """This process's parts of a row, none longer than ``most`` but where one history is."""
        shares = split(whole(row), world.size()) if world.size() > 1 else [whole(row)]
        pending = [shares[world.rank()] if world.rank() < len(shares) else _idle(row)]
        fitting = []
        while pending:
            part = pending.pop(0)
            if self.most is None or len(part.row.ids) <= self.most or len(part.row.histories) == 1:
                fitting.append(part)
            else:
                pending = split(part, 2) + pending
        return fitting

    def attempt(self, rows: Sequence[Row], compute: Callable[[list[list[Part]]], T]) -> T:
        """What ``compute`` makes of the parts of each row; tried again with halves where memory ran out.

        ``compute`` must begin anew each time. Raises TrainingError when a single history is too long.
        """
        while True:
            parts = [self.parts(row) for row in rows]
            try:
                return compute(parts)
            except (MemoryError, RuntimeError) as error:
                if world.size() > 1 or not out_of_memory(error):
                    raise
            self._shrink(parts)

    def _shrink(self, parts: list[list[Part]]) -> None:
        longest = max((part.row for each in parts for part in each), key=lambda row: len(row.ids))
        tokens = len(longest.ids)
        if len(longest.histories) == 1:
            raise TrainingError(
                f"A conversation of {tokens} tokens does not fit this worker's memory. Send conversations of at most "
                f"{tokens // 2} tokens, or set packed_sequence_length to {tokens // 2}, which leaves out longer ones."
            )
        self.most = tokens // 2
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that there was no memory left: torch has no class of its own for it on a CPU."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def _idle(row: Row) -> Part:
    """A part that trains nothing, for a process with no share of a row: sharded layers wait for everybody."""
    nothing = build_row([History([0], [False], [0.0])], [0]).to(row.ids.device)
    return Part(nothing, torch.zeros(row.num_trained, dtype=torch.bool, device=row.targets.device))
