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
        self._as_ids = bool(task.chat.return_tokens_as_token_ids)
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
        start = self.count
        text, piece.tokens = self._text(sequence.tokens[start:])
        if self._reader.found is not None:
            finish, piece.stop = "stop", self._reader.found
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
            piece.logprobs = [self._logprob(at) for at in range(start, self.count)]
        return piece

    def _text(self, tokens: list[int]) -> tuple[str, list[int]]:
        """The text that these tokens make certain, and those of them that come before the end of a stop string."""
        sampling, shown = self.sequence.sampling, self._vocabulary.shown
        last = (
            len(tokens) - 1
            if tokens and sampling.ends_at(tokens[-1], self.count + len(tokens))
            else len(tokens)
        )
        if not self._reader.stops:
            self.count += len(tokens)
            return self._reader.feed(shown(tokens[:last], special=self._special)), tokens
        text = ""
        for at, token in enumerate(tokens):
            self.count += 1
            data = b"" if at == last else shown([token], special=self._special)
            text += self._reader.feed(data, waits=self.count > sampling.least)
            if self._reader.found is not None:
                return text, tokens[: at + 1]
        return text, tokens

    def _logprob(self, at: int) -> dict[str, Any]:
        """One entry of ``logprobs.content``."""
        sequence = self.sequence
        best: Alternatives = sequence.alternatives[at] if sequence.sampling.logprobs else []
        return {
            **self._told(sequence.tokens[at], sequence.logprobs[at]),
            "top_logprobs": [self._told(token, logprob) for token, logprob in best],
        }

    def _told(self, token: int, logprob: float) -> dict[str, Any]:
        name, data = self._vocabulary.told(token)
        return {
            "token": f"token_id:{token}" if self._as_ids else name,
            "logprob": logprob if logprob > LOWEST else LOWEST,
            "bytes": data,
        }
