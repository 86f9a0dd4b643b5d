"""Tool calls in an answer: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, told apart from text."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any

from .texts import CLOSE, OPEN, overlap

__all__ = ["CLOSE", "OPEN", "CallReader", "Part"]


@dataclass
class Part:
    """What a piece of an answer turned out to be."""

    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class CallReader:
    """Reads an answer piece by piece; the parts it returns add up to the same whatever the pieces are.

    White space before a call and around calls is layout, not content. A block that is no call stays text, verbatim.
    """

    def __init__(self, *, parallel: bool = True) -> None:
        self.calls = 0
        self._parallel = parallel
        self._held = ""
        self._layout = ""
        self._inside = False

    def feed(self, text: str, *, final: bool = False) -> Part:
        """The content and the whole calls that have become certain."""
        self._held += text
        part = Part()
        while self._inside or OPEN in self._held:
            if not self._inside:
                before, _, self._held = self._held.partition(OPEN)
                part.text += before.rstrip()
                self._layout = before[len(before.rstrip()) :]
                self._inside = True
            if CLOSE not in self._held and not final:
                return part
            body, closed, self._held = self._held.partition(CLOSE)
            self._inside = False
            call = _call(body)
            if call is None:
                part.text += self._layout + OPEN + body + closed
            elif self._parallel or self.calls == 0:
                part.calls.append({"index": self.calls, **call})
                self.calls += 1
        ready = self._held if final else self._held[: len(self._held) - self._unsure()]
        self._held = self._held[len(ready) :]
        part.text += "" if self.calls and not ready.strip() else ready
        return part

    def _unsure(self) -> int:
        """How much at the end may yet belong to a call: the beginning of a tag, and the white space before it."""
        tag = overlap(self._held, OPEN)
        body = self._held[: len(self._held) - tag]
        return tag + len(body) - len(body.rstrip())


def _call(body: str) -> dict[str, Any] | None:
    """One OpenAI tool call from a block, or None when the block is not one."""
    try:
        said = json.loads(body)
    except ValueError:
        return None
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return None
    arguments = said.get("arguments", {})
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": said["name"], "arguments": written},
    }
