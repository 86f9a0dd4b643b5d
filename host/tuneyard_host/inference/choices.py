"""The tokens of one choice as a client reads them: text, tool calls, log-probabilities, and why it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .prompts import Task
from .sequences import Alternatives, Sequence
from .texts import Reader, Vocabulary
from .tools import CallReader

LOWEST = -9999.0
"""What stands for a log-probability of minus infinity, which JSON cannot say."""


@dataclass
class Piece:
    """What is new in a choice since it was last read."""

    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None
    stop: str | int | None = None

    def __iadd__(self, later: Piece) -> Piece:
        self.text += later.text
        self.calls += later.calls
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.finish, self.stop = later.finish, later.stop
        return self


class Choice:
    """Reads one sequence while it grows; reading it in pieces or at once gives the same."""

    def __init__(self, index: int, sequence: Sequence, task: Task, vocabulary: Vocabulary) -> None:
        self.index, self.sequence, self.finish = index, sequence, None
        self.count = 0
        """How many tokens belong to the answer: those after a stop string do not."""
        self._task, self._vocabulary = task, vocabulary
        self._special = not task.option("skip_special_tokens", True)
        self._reader = Reader(task.stops, keep_stop=bool(task.option("include_stop_str_in_output", False)))
        self._calls = CallReader(parallel=task.chat.parallel_tool_calls) if task.calls else None

    finish: str | None

    def read(self) -> Piece:
        """Everything that became certain since the last call; raises the sequence's error when it has one."""
        sequence, piece = self.sequence, Piece()
        if self.finish is not None:
            return piece
        if sequence.error is not None:
            raise sequence.error
        finish = sequence.finish  # before the tokens: when it is set, they are all there
        tokens = sequence.tokens[self.count :]
        text = ""
        for token in tokens:
            self.count += 1
            ended = sequence.sampling.ends_at(token, self.count)
            data = b"" if ended else self._vocabulary.shown([token], special=self._special)
            text += self._reader.feed(data, waits=self.count > sequence.sampling.least)
            piece.tokens.append(token)
            if self._reader.found is not None:
                finish = "stop"
                piece.stop = self._reader.found
                break
        if finish is not None:
            text += self._reader.feed(b"", final=True)
            if piece.stop is None and sequence.tokens[-1] in self._task.chat.stop_token_ids:
                piece.stop = sequence.tokens[-1] if finish == "stop" else None
        piece.text = text
        if self._calls is not None:
            part = self._calls.feed(text, final=finish is not None)
            piece.text, piece.calls = part.text, part.calls
            if finish == "stop" and self._calls.calls:
                finish = "tool_calls"
        piece.finish = self.finish = finish
        if sequence.sampling.logprobs is not None:
            start = self.count - len(piece.tokens)
            piece.logprobs = [self._logprob(at) for at in range(start, self.count)]
        return piece

    def _logprob(self, at: int) -> dict[str, Any]:
        """One entry of ``logprobs.content``."""
        sequence = self.sequence
        best: Alternatives = sequence.alternatives[at] if sequence.sampling.logprobs else []
        return {
            **self._told(sequence.tokens[at], sequence.logprobs[at]),
            "top_logprobs": [self._told(token, logprob) for token, logprob in best],
        }

    def _told(self, token: int, logprob: float) -> dict[str, Any]:
        as_id = self._task.chat.return_tokens_as_token_ids
        return {
            "token": f"token_id:{token}" if as_id else self._vocabulary.name(token),
            "logprob": max(logprob, LOWEST),
            "bytes": list(self._vocabulary.bytes_of(token)),
        }
