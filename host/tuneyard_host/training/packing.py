"""From histories to rows: what conversations have in common at their beginning is computed once.

Sorted by their tokens, conversations that share a beginning are neighbours, and the tokens that each adds
to the one before it are exactly the nodes of their prefix tree in depth-first order. So a row is a slice of
the sorted list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tuneyard_host.training.attention import Forest

SHORTEST_SHARED = 8
"""A beginning shorter than this is repeated: a run of few tokens costs more in calls than it saves."""

LEAST_ROW, MOST_ROW = 2048, 8192
"""The bounds of a row's length where the job does not set it, in tokens."""


@dataclass
class History:
    """One tokenised conversation: (T,) lists, and who it belongs to."""

    ids: list[int]
    trained: list[bool]
    logprobs: list[float]
    """What the rollout recorded for each token; NaN where there is none."""
    advantage: float = 0.0
    weight: float = 1.0
    owner: int = 0
    """The trajectory or example that it is part of, as a position in the plan's ledger."""

    @property
    def num_trained(self) -> int:
        """How many of its tokens train."""
        return sum(self.trained)


@dataclass
class Row:
    """Histories that are computed in one forward pass: (T,) tokens in all, (M,) of them trained."""

    ids: Tensor
    positions: Tensor
    forest: Forest
    predictors: Tensor
    """(M,) for each trained token, the place in the row of the token before it; ascending."""
    targets: Tensor
    logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    history: Tensor
    """(M,) which of the row's histories a trained token belongs to."""
    histories: Sequence[History] = ()
    shared: Sequence[int] = ()
    """How many tokens each history takes over from the one before it."""

    @property
    def owners(self) -> list[int]:
        """The owner of each history."""
        return [history.owner for history in self.histories]

    @property
    def num_trained(self) -> int:
        """How many tokens of the row train, counted once for each history that trains on them."""
        return len(self.targets)

    def to(self, device: Any) -> Row:
        """The same row with its tensors on another device."""
        found = vars(self).items()
        tensors: Any = {name: value.to(device) for name, value in found if isinstance(value, Tensor)}
        return replace(self, **tensors)


def pack(histories: Sequence[History], *, length: int) -> list[Row]:
    """Rows of at most ``length`` tokens, cut where the fewest tokens are computed twice."""
    ordered, costs, shared = _in_order(histories)
    return [
        build_row(ordered[first:last], [0, *shared[first + 1 : last]])
        for first, last in cuts(costs, shared, length=length)
    ]


def row_length(histories: Sequence[History]) -> int:
    """The row length of a job that does not set one: longer than the least where that saves a tenth of the work.

    It depends on nothing but the histories, so a job has as many steps wherever it runs.
    """
    _, costs, shared = _in_order(histories)
    once = sum(costs) - sum(shared)
    length = max([LEAST_ROW, *costs])
    while length < MOST_ROW:
        twice = sum(shared[first] for first, _ in cuts(costs, shared, length=length))
        if twice <= once / 10:
            break
        length *= 2
    return length


def _in_order(histories: Sequence[History]) -> tuple[list[History], list[int], list[int]]:
    """The histories sorted by their tokens, how long each is, and how much of it is shared with the one before."""
    ordered = sorted(histories, key=lambda history: (history.ids, history.owner))
    ids = [history.ids for history in ordered]
    return ordered, [len(each) for each in ids], shared_beginnings(ids)


def shared_beginnings(ordered: Sequence[list[int]]) -> list[int]:
    """How many tokens each of the sorted conversations takes over from the one before it; 0 for the first.

    Any number up to the common beginning is right; these are chosen so that no two branching points of one
    conversation are closer than ``SHORTEST_SHARED``.
    """
    common = [0, *(_common(a, b) for a, b in pairwise(ordered))]
    chosen = [0] * len(common)
    pending = [(1, len(common), 0)]
    while pending:
        first, last, floor = pending.pop()
        start = first
        for end in range(first, last + 1):
            if end < last and common[end] >= floor + SHORTEST_SHARED:
                continue
            if end < last:
                chosen[end] = floor
            if end > start:
                pending.append((start, end, min(common[start:end])))
            start = end + 1
    return chosen


def cuts(costs: Sequence[int], shared: Sequence[int], *, length: int) -> list[tuple[int, int]]:
    """The slices of the sorted conversations that make rows, each of at most ``length`` tokens.

    Least tokens computed twice, then fewest rows, then rows of equal size: the shortest path over the
    places to cut.
    """
    best: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)]
    for last in range(1, len(costs) + 1):
        options = []
        size, first = 0, last - 1
        while first >= 0:
            size += costs[first]
            if size > length and first < last - 1:
                break
            again, rows, squares, _ = best[first]
            options.append((again + shared[first], rows + 1, squares + size * size, first))
            size -= shared[first]
            first -= 1
        best.append(min(options))
    slices, last = [], len(costs)
    while last > 0:
        first = best[last][3]
        slices.append((first, last))
        last = first
    return slices[::-1]


def build_row(histories: Sequence[History], shared: Sequence[int]) -> Row:
    """The forest of sorted histories, of which each takes over its first ``shared`` tokens from the one before."""
    ids: list[int] = []
    positions: list[int] = []
    paths: list[list[int]] = []
    terms: list[tuple[int, int, float, float, float, int]] = []
    path: list[int] = []
    for number, (history, taken) in enumerate(zip(histories, shared, strict=True)):
        path = path[:taken] + list(range(len(ids), len(ids) + len(history.ids) - taken))
        ids += history.ids[taken:]
        positions += range(taken, len(history.ids))
        paths.append(path)
        terms += [
            (path[at - 1], history.ids[at], history.logprobs[at], history.advantage, history.weight, number)
            for at in range(1, len(history.ids))
            if history.trained[at]
        ]
    terms.sort(key=lambda term: term[0])
    predictors, targets, logprobs, advantages, weights, of = zip(*terms, strict=True) if terms else [()] * 6
    return Row(
        ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        forest=_forest(paths, shared, len(ids)),
        predictors=torch.tensor(predictors, dtype=torch.long),
        targets=torch.tensor(targets, dtype=torch.long),
        logprobs=torch.tensor(logprobs, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        weights=torch.tensor(weights, dtype=torch.float32),
        history=torch.tensor(of, dtype=torch.long),
        histories=histories,
        shared=shared,
    )


def _forest(paths: list[list[int]], shared: Sequence[int], size: int) -> Forest:
    """Cut the tokens of a row into runs: at the start of each history, and where one branches off."""
    starts = {0}
    for path, taken in zip(paths, shared, strict=True):
        starts |= {path[taken]} if taken < len(path) else set()
    for before, taken in zip(paths, shared[1:], strict=False):
        starts |= {before[taken]} if 0 < taken < len(before) else set()
    ordered = sorted(starts)
    run_at = {start: run for run, start in enumerate(ordered)}
    lengths = [end - start for start, end in zip(ordered, [*ordered[1:], size], strict=True)]
    above: dict[int, list[int]] = {}
    for path in paths:
        runs = [run_at[place] for place in path if place in run_at]
        for depth, run in enumerate(runs):
            above[run] = runs[: depth + 1]
    return Forest(lengths, [above[run] for run in range(len(ordered))])


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common beginning of two lists."""
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return min(len(a), len(b))
