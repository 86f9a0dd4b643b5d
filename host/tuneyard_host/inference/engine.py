"""Continuous batching: everything that runs takes its next token together, and newcomers join between two tokens.

A step admits what waits, reads one chunk of the new prompts (a long prompt never holds up the others for longer than
a chunk), draws one token for every sequence, and tells the coroutines that wait for them. One thread does all of it.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from aws_lambda_powertools import Logger
from torch import Tensor

from tuneyard.errors import Invalid, Unavailable
from tuneyard_host.bases import Base

from .attention import Segment
from .forward import Network
from .lora import Adapter, Mix
from .rows import Rows
from .sampling import draw
from .sequences import Alternatives, Sequence, Waiting, shares

logger = Logger(service="tuneyard-inference")


@dataclass(frozen=True)
class Limits:
    """How much of the machine the engine takes."""

    rows: int = 256
    """Sequences that run at once; each has room for a whole context, and fewer are made when memory is short."""
    waiting: int = 8192
    chunk: int = 256
    """Prompt tokens that are read between two tokens of everybody else."""
    worth_waiting: int = 32
    """Tokens of a shared prompt that are worth waiting for, when another row is just reading them."""
    memory: int | None = None
    """Bytes for keys and values; by default a quarter of what the machine has."""


class Engine:
    """One base model, its key-value memory and the thread that drives them."""

    def __init__(self, base: Base, limits: Limits | None = None) -> None:
        self.base, self.limits = base, limits or Limits()
        self.network = Network(base.model, base.context_length)
        self.context: int = base.context_length
        room = (self.limits.memory or self.network.most_bytes()) // self.network.row_bytes(self.context)
        self.rows = Rows(self.network.memory(max(1, min(self.limits.rows, room)), self.context))
        self.running: list[Sequence | None] = []
        self.waiting = Waiting()
        self._reading: list[Sequence] = []
        self._mixes = {"read": Mix([None]), "write": Mix([None])}
        self._clock = 0
        self._work = threading.Condition()
        self._arrived: list[Sequence] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"engine {base.spec.id}", daemon=True)
        self._thread.start()

    def submit(self, sequences: list[Sequence]) -> None:
        """Queue sequences; Unavailable when too many wait already."""
        with self._work:
            if self._closed:
                raise Unavailable("The inference service is stopping.", retry_after=5)
            waiting = self.waiting.count + len(self._arrived)
            if waiting + len(sequences) > self.limits.waiting:
                raise Unavailable(f"{waiting} answers are waiting already. Try again later.", retry_after=2)
            self._arrived.extend(sequences)
            self._work.notify()

    def cancel(self, sequences: Iterable[Sequence]) -> None:
        """Stop working on sequences that nobody reads any more; their rows are free by the next step."""
        for sequence in sequences:
            sequence.cancelled = True

    def close(self) -> None:
        """End the thread; whoever still waits hears Unavailable."""
        with self._work:
            self._closed = True
            self._work.notify()
        self._thread.join(timeout=10)

    @property
    def load(self) -> dict[str, int]:
        """How many sequences run and wait."""
        running = sum(s is not None for s in self.running)
        waiting = self.waiting.count + len(self._arrived)
        return {"running": running, "waiting": waiting, "rows": self.rows.count}

    def _run(self) -> None:
        """Steps, as long as there is something to do."""
        torch.set_flush_denormal(
            True
        )  # unlikely tokens and far positions are full of them, and they are slow
        while True:
            with self._work:
                while not (self._closed or self._arrived or self.waiting.count or any(self.running)):
                    self._work.wait()
                if self._closed:
                    break
                self.waiting.add(self._arrived)
                self._arrived.clear()
            try:
                with torch.inference_mode():
                    self._step()
            except Exception as error:  # the thread outlives a bad step: those in it are told, the rest go on
                logger.error("inference step failed", exc_info=error)
                self._fail_all("A step of the inference engine failed; it was logged. Try again.")
        self._fail_all("The inference service is stopping.")

    def _step(self) -> None:
        """Free, admit, read, write; what is new is told at once, a first token before everybody's next."""
        self._clock += 1
        for row, sequence in enumerate(self.running):
            if sequence is not None and (sequence.done or sequence.cancelled):
                self._release(row)
        self._admit()
        self._close_gaps()
        self._tell(self._read())
        self._tell(self._write())

    def _release(self, row: int) -> None:
        """Take a sequence out of its row, which keeps what it read."""
        sequence = self.running[row]
        if sequence in self._reading:
            self._reading.remove(sequence)
        if sequence is not None and (sequence.error is not None or not sequence.tokens):
            self.rows.clear(row)  # only a first token shows that what was read is sound
        self.rows.abandon(row)
        self.rows.used[row] = self._clock
        self.running[row] = None

    def _admit(self) -> None:
        """Give free rows to those who wait, each with the longest beginning that some row already holds."""
        if not self.waiting.count:
            return
        projects = Counter(s.project for s in self.running if s is not None)
        free = [
            row for row in range(self.rows.count) if row >= len(self.running) or self.running[row] is None
        ]
        deferred: list[Sequence] = []
        while free and self.waiting.count and len(deferred) < self.limits.rows:
            sequence = self.waiting.next(projects)
            if sequence.cancelled:
                continue
            source, here, soon = self._match(sequence)
            if soon - here >= self.limits.worth_waiting:
                deferred.append(sequence)
                continue
            row, source = self.rows.place(free, source, here)
            free.remove(row)
            self.rows.begin(row, sequence.owner, sequence.prompt, source=source, shared=here)
            self.rows.knobs[row] = sequence.sampling.knobs()
            sequence.row, sequence.read, sequence.cached, sequence.matched = row, here, here, self._clock
            self.running.extend([None] * (row + 1 - len(self.running)))
            self.running[row] = sequence
            self._reading.append(sequence)
            projects[sequence.project] += 1
        self.waiting.put_back(deferred)

    def _match(self, sequence: Sequence) -> tuple[int, int, int]:
        """The row that holds most of what its prompt begins with, how much, and how much a row will hold soon."""
        most = 0 if sequence.sampling.prompt_logprobs is not None else len(sequence.prompt) - 1
        source, here, soon = self.rows.match(sequence.owner, sequence.prompt)
        return source, min(here, most), min(soon, most)

    def _match_again(self, sequence: Sequence) -> bool:
        """Take what was read since by others of a prompt that was not begun yet; whether that was anything."""
        if sequence.matched == self._clock or sequence.read > sequence.cached:
            return False
        sequence.matched = self._clock
        source, here, _ = self._match(sequence)
        if here <= sequence.read:
            return False
        self.rows.take(sequence.row, source, here)
        sequence.read = sequence.cached = here
        return True

    def _close_gaps(self) -> None:
        """Move the last sequences into rows that stand empty between others: a batch is always the first B rows."""
        for row in range(len(self.running)):
            while self.running and self.running[-1] is None:
                self.running.pop()
            if row >= len(self.running):
                return
            if self.running[row] is None:
                self.rows.swap(row, len(self.running) - 1)
                moved = self.running[row] = self.running.pop()
                if moved is not None:
                    moved.row = row

    def _read(self) -> list[Sequence]:
        """One chunk of the prompts that are not read yet; those that end in it get their first token."""
        sizes = shares(self._reading, self.limits.chunk)
        while any([self._match_again(sequence) for sequence in sizes]):
            sizes = shares(self._reading, self.limits.chunk)
        readers = list(sizes)
        segments = [Segment(s.row, s.read, s.prompt[s.read : s.read + size]) for s, size in sizes.items()]
        if not segments:
            return []
        news = zip(readers, segments, strict=True)
        owners = [sequence.adapter for sequence, segment in news for _ in segment.tokens]
        hidden = self.network.prefill(segments, self.rows.memory, self._mix("read", owners))
        ends, finished, at = [], [], 0
        for sequence, segment in zip(readers, segments, strict=True):
            self._report_prompt(sequence, segment, hidden[at : at + len(segment.tokens)])
            at += len(segment.tokens)
            sequence.read += len(segment.tokens)
            self.rows.filled[sequence.row] = sequence.read
            if sequence.read == len(sequence.prompt):
                ends.append(at - 1)
                finished.append(sequence)
        self._reading = [s for s in self._reading if s.read < len(s.prompt)]
        if finished:
            last = hidden.index_select(0, torch.tensor(ends, device=hidden.device))
            self._draw(finished, self.network.logits(last))
        return finished

    def _write(self) -> list[Sequence]:
        """The next token of every sequence whose prompt is read; the others' rows only keep their places."""
        writers = [s for s in self.running if s is not None and s.tokens and not s.done]
        if not writers:
            return []
        rows, batch = self.rows, max(s.row for s in writers) + 1
        mix = self._mix("write", [None if s is None else s.adapter for s in self.running[:batch]])
        hidden = self.network.decode(rows.last[:batch], rows.filled[:batch], rows.memory, mix)
        index = np.array([s.row for s in writers])
        rows.held[index, rows.filled[index]] = rows.last[index]
        rows.filled[index] += 1
        rows.promised[index] = rows.filled[index]
        if len(writers) < batch:
            hidden = hidden.index_select(0, torch.from_numpy(index).to(hidden.device))
        self._draw(writers, self.network.logits(hidden))
        return writers

    def _mix(self, use: str, owners: list[Adapter | None]) -> Mix:
        """The adapters of a batch side by side; kept from step to step as long as they serve."""
        adapters = list({"" if owner is None else owner.id: owner for owner in owners}.values())
        if not self._mixes[use].covers(adapters):
            self._mixes[use] = Mix(adapters)
        return self._mixes[use].choose(owners)

    def _draw(self, sequences: list[Sequence], logits: Tensor) -> None:
        """Append one token to each sequence, from its row of logits (B, V)."""
        index = np.array([s.row for s in sequences])
        shaped = logits
        for i, sequence in enumerate(sequences):
            if sequence.sampling.shaped:
                shaped = logits.clone() if shaped is logits else shaped
                shaped[i] = sequence.shape(logits[i])
        picks = draw(shaped, self.rows.knobs[index])
        tokens = picks.tolist()
        own: list[float] = logits.gather(1, picks[:, None])[:, 0].tolist()
        self.rows.last[index] = tokens
        self.rows.knobs["drawn"][index] += np.uint64(1)
        logprobs = [0.0] * len(sequences)
        most = max((s.sampling.logprobs for s in sequences if s.sampling.logprobs is not None), default=None)
        best: list[Alternatives] | None = None
        if most is not None:
            norms = logits.logsumexp(-1)
            logprobs = [a - b for a, b in zip(own, norms.tolist(), strict=True)]
            best = _alternatives(logits - norms[:, None], most) if most else None
        for i, sequence in enumerate(sequences):
            if not math.isfinite(own[i]):
                sequence.error = Invalid(
                    "This checkpoint computes numbers that are not finite.", param="model"
                )
                continue
            count = sequence.sampling.logprobs
            sequence.append(tokens[i], logprobs[i], best[i][:count] if best and count else None)

    def _report_prompt(self, sequence: Sequence, part: Segment, hidden: Tensor) -> None:
        """The log-probability of each prompt token but the first, given those before it."""
        count = sequence.sampling.prompt_logprobs
        if count is None:
            return
        following = sequence.prompt[part.start + 1 : part.start + 1 + len(part.tokens)]
        logprobs = self.network.logits(hidden[: len(following)]).log_softmax(-1)
        own = logprobs.gather(1, torch.from_numpy(following).long().to(hidden.device)[:, None])
        ranks = (logprobs > own).sum(-1) + 1
        best = _alternatives(logprobs, count)
        sequence.prompt_logprobs.extend(zip(own[:, 0].tolist(), ranks.tolist(), best, strict=True))

    def _tell(self, sequences: list[Sequence]) -> None:
        """Ring the bells of those who wait for news of these sequences: one call into each event loop."""
        bells: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
        for sequence in sequences:
            if sequence.eager or sequence.done:
                bells.setdefault(sequence.bell.loop, []).append(sequence.bell.event)
        for loop, events in bells.items():
            try:
                loop.call_soon_threadsafe(_ring, events)
            except RuntimeError:  # the loop is closed: nobody will ever read these
                self.cancel(s for s in sequences if s.bell.loop is loop)

    def _fail_all(self, reason: str) -> None:
        with self._work:
            lost = [s for s in self.running if s is not None] + self.waiting.drop() + self._arrived
            self._arrived = []
        self.running, self._reading = [], []
        self.rows.forget()
        for sequence in lost:
            sequence.error = None if sequence.finish else Unavailable(reason, retry_after=5)
        self._tell(lost)


def _alternatives(logprobs: Tensor, count: int) -> list[Alternatives]:
    """The ``count`` likeliest tokens of each row of log-probabilities (B, V)."""
    values, tokens = logprobs.topk(count, -1)
    return [list(zip(t, v, strict=True)) for t, v in zip(tokens.tolist(), values.tolist(), strict=True)]


def _ring(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()
