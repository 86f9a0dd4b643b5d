"""The shapes of an answer: ``chat.completion`` and ``chat.completion.chunk``, as OpenAI and vLLM write them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from .choices import LOWEST, Choice, Piece
from .prompts import Task
from .texts import Vocabulary


class Answer:
    """One answer's frame: its id, its model name, and what the client wanted to be told."""

    def __init__(self, task: Task, fingerprint: str) -> None:
        self._task, self._chat = task, task.chat
        self._frame: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": task.chat.model,
            "system_fingerprint": fingerprint,
        }

    def whole(
        self, choices: Sequence[Choice], pieces: Sequence[Piece], vocabulary: Vocabulary
    ) -> dict[str, Any]:
        """A ``chat.completion``."""
        body = {
            **self._frame,
            "object": "chat.completion",
            "choices": [self._choice(choice, piece) for choice, piece in zip(choices, pieces, strict=True)],
            "usage": self.usage(choices),
        }
        if self._chat.return_token_ids:
            body["prompt_token_ids"] = self._task.prompt.tolist()
        if self._chat.prompt_logprobs is not None:
            body["prompt_logprobs"] = _prompt_logprobs(choices[0], self._task, vocabulary)
        return body

    def _choice(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.calls:
            calls = [{name: value for name, value in call.items() if name != "index"} for call in piece.calls]
            message |= {"content": piece.text or None, "tool_calls": calls}
        return {
            "index": choice.index,
            "message": message,
            "finish_reason": piece.finish,
            "stop_reason": piece.stop,
            **self._tokens(piece),
        }

    def first(self, choice: Choice) -> dict[str, Any]:
        """The chunk that opens a choice: its role."""
        part = {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        body = self.chunk([part | {"finish_reason": None}])
        if self._chat.return_token_ids:
            body["prompt_token_ids"] = self._task.prompt.tolist()
        return body

    def more(self, choice: Choice, piece: Piece) -> dict[str, Any] | None:
        """The chunk of a piece; None when it has nothing to tell."""
        delta: dict[str, Any] = {}
        if piece.text:
            delta["content"] = piece.text
        if piece.calls:
            delta["tool_calls"] = piece.calls
        asked = piece.tokens and (self._chat.logprobs or self._chat.return_token_ids)
        if not (delta or asked or piece.finish):
            return None
        part = {"index": choice.index, "delta": delta, "finish_reason": piece.finish, **self._tokens(piece)}
        return self.chunk([part | ({"stop_reason": piece.stop} if piece.finish else {})])

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A ``chat.completion.chunk``."""
        return {**self._frame, "object": "chat.completion.chunk", "choices": choices}

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Tokens read and written; those of the prompt that were still in memory are counted apart as well."""
        read, written = len(self._task.prompt), sum(choice.count for choice in choices)
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": choices[0].sequence.cached},
        }

    def _tokens(self, piece: Piece) -> dict[str, Any]:
        told: dict[str, Any] = {
            "logprobs": {"content": piece.logprobs, "refusal": None} if self._chat.logprobs else None
        }
        if self._chat.return_token_ids:
            told["token_ids"] = piece.tokens
        return told


def _prompt_logprobs(choice: Choice, task: Task, vocabulary: Vocabulary) -> list[dict[str, Any] | None]:
    """vLLM's list: for each prompt token but the first, itself and the likeliest ones, with rank and text."""
    told: list[dict[str, Any] | None] = [None]
    for token, (own, rank, best) in zip(
        task.prompt[1:].tolist(), choice.sequence.prompt_logprobs, strict=True
    ):
        ranked = [(token, own, rank), *((other, logprob, n) for n, (other, logprob) in enumerate(best, 1))]
        told.append(
            {
                str(t): {"logprob": max(logprob, LOWEST), "rank": n, "decoded_token": vocabulary.name(t)}
                for t, logprob, n in ranked
            }
        )
    return told
