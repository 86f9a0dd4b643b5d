"""One choice on its way through the engine, and the queue in which it waits."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tuneyard.errors import ApiError, Invalid

from .lora import Adapter
from .sampling import Sampling

Alternatives = list[tuple[int, float]]
"""Tokens with their log-probabilities, likeliest first."""


@dataclass
class Bell:
    """How the engine's thread calls the coroutine that reads a request's tokens."""

    loop: asyncio.AbstractEventLoop
    event: asyncio.Event


@dataclass(eq=False)
class Sequence:
    """A prompt and the tokens that follow it. The engine appends; readers look at a length and read up to it."""

    prompt: np.ndarray
    """(P,) int32"""
    sampling: Sampling
    adapter: Adapter | None
    project: str
    bell: Bell
    eager: bool = False
    """Whether the bell rings for every token, or only at the end."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[Alternatives] = field(default_factory=list)
    prompt_logprobs: list[tuple[float, int, Alternatives]] = field(default_factory=list)
    """For each prompt token but the first: its log-probability, its rank, and the likeliest ones."""
    finish: str | None = None
    error: ApiError | None = None
    cancelled: bool = False

    row: int = -1
    read: int = 0
    """How much of the prompt has its keys and values in memory."""
    cached: int = 0
    """How much of it was there already."""
    matched: int = -1
    """When the rows were last searched for its beginning."""
    _counts: Tensor | None = None
    _seen: Tensor | None = None
    _noted: int = 0

    @property
    def done(self) -> bool:
        return self.finish is not None or self.error is not None

    @property
    def owner(self) -> str:
        return "" if self.adapter is None else self.adapter.id

    def append(self, token: int, logprob: float, alternatives: Alternatives | None) -> None:
        """Take the next token, and notice when it is the last."""
        self.logprobs.append(logprob)
        if alternatives is not None:
            self.alternatives.append(alternatives)
        self.tokens.append(token)
        ended, grammar = self.sampling.ends_at(token, len(self.tokens)), self.sampling.grammar
        if grammar is not None:
            grammar.advance(token)
            ended |= grammar.complete and (token in self.sampling.ends or not self.sampling.ends)
            if grammar.error:
                self.error = Invalid(
                    f"The answer cannot be given the form that was asked for: {grammar.error}",
                    param=grammar.param,
                )
        if ended:
            self.finish = "stop"
        elif len(self.tokens) >= self.sampling.most:
            self.finish = "length"

    def shape(self, logits: Tensor) -> Tensor:
        """Its logits (V,) with penalties, bias and bans, as they are drawn from."""
        wants = self.sampling
        if self._counts is None or self._seen is None:
            self._counts, self._seen = torch.zeros_like(logits), torch.zeros_like(logits, dtype=torch.bool)
            self._seen[torch.from_numpy(self.prompt).long()] = True
        for token in self.tokens[self._noted :]:
            self._counts[token] += 1
            self._seen[token] = True
        self._noted = len(self.tokens)
        if wants.repetition != 1:
            punished = torch.where(logits > 0, logits / wants.repetition, logits * wants.repetition)
            logits = torch.where(self._seen, punished, logits)
        logits = logits - wants.frequency * self._counts - wants.presence * (self._counts > 0)
        if wants.bias:
            logits[list(wants.bias)] += torch.tensor(list(wants.bias.values()), device=logits.device)
        if wants.allowed is not None:
            allowed = torch.full_like(logits, -torch.inf)
            allowed[wants.allowed] = 0
            logits = logits + allowed
        if wants.grammar is not None:
            logits = wants.grammar.mask(logits)
        if len(self.tokens) < wants.least and wants.ends:
            longer = logits.index_fill(0, torch.tensor(list(wants.ends), device=logits.device), -torch.inf)
            logits = (
                longer if longer.isfinite().any() else logits
            )  # a form that is complete ends all the same
        return logits


class Waiting:
    """Sequences without a row. The project that runs the fewest goes first; within it, first come first served."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Sequence]] = {}
        self.count = 0

    def add(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._lines.setdefault(sequence.project, deque()).append(sequence)
            self.count += 1

    def next(self, running: Counter[str]) -> Sequence:
        """Remove and return the one that goes next, given how many each project runs."""
        line = self._lines[
            min((name for name, line in self._lines.items() if line), key=lambda n: running[n])
        ]
        self.count -= 1
        return line.popleft()

    def put_back(self, sequences: list[Sequence]) -> None:
        """Return some to the front of their lines, in the order in which they were taken."""
        for sequence in reversed(sequences):
            self._lines[sequence.project].appendleft(sequence)
            self.count += 1

    def drop(self) -> list[Sequence]:
        """Everything that waits, removed."""
        dropped = [sequence for line in self._lines.values() for sequence in line]
        self._lines.clear()
        self.count = 0
        return dropped


ABOUT = 16
"""Tokens by which one prompt is hardly shorter than another."""


def shares(reading: list[Sequence], room: int) -> dict[Sequence, int]:
    """How many tokens of each prompt are read next, ``room`` in all, for prompts in their order of arrival.

    Half is for who came first, and the rest for those with least to go: neither a long prompt nor many short ones
    keep the others waiting.
    """
    left = {sequence: len(sequence.prompt) - sequence.read for sequence in reading}
    sizes: dict[Sequence, int] = {}
    if reading:
        first = reading[0]
        sizes[first] = min(left[first], room if len(left) == 1 else room // 2)
        room -= sizes[first]
        # Of about equals those who came first: they have the first rows, and a step decodes up to the last that writes.
        for sequence in [*sorted(reading[1:], key=lambda s: left[s] // ABOUT), first]:
            more = min(left[sequence] - sizes.get(sequence, 0), room)
            if more:
                sizes[sequence] = sizes.get(sequence, 0) + more
                room -= more
    return sizes
