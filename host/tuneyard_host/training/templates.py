"""What a chat template writes around the turns of a conversation, for any Hugging Face template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from tuneyard.errors import TrainingError
from tuneyard_host.bases import Base
from tuneyard_host.inference.texts import Vocabulary

SENTINEL = "TuneyardTurnStandsHere"
Message = dict[str, Any]


class Template:
    """The chat template and tokenizer of a base model."""

    def __init__(self, base: Base) -> None:
        self.base = base
        self.tokenizer = base.tokenizer
        self._thinks = "enable_thinking" in str(self.tokenizer.chat_template)
        self._encoded: dict[str, list[int]] = {}
        lone = self.render(
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": SENTINEL}], None
        )
        self.end_of_turn = lone.partition(SENTINEL)[2]
        self.ends = self._end_tokens()

    def render(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None,
        *,
        prompt: bool = False,
        thinking: bool = True,
    ) -> str:
        """The conversation as text; ``prompt`` ends it with the header of the answer to come."""
        options = {"enable_thinking": thinking} if self._thinks else {}
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt, **options
                )
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise TrainingError(
                f"the chat template of {self.base.spec.id} refuses the conversation: {error}"
            ) from error

    def encode(self, text: str) -> list[int]:
        """The tokens of text that the template wrote: its special tokens are in it already."""
        if text not in self._encoded:
            self._encoded[text] = self.tokenizer.encode(text, add_special_tokens=False)
        return self._encoded[text]

    def between(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, *, after: int, upto: int,
                thinking: bool) -> str:  # fmt: skip
        """The template's text from the last word of turn ``after`` to the first of the answer at ``upto``.

        A stand-in takes the place of the turn, so that nothing the template does to its words matters. A
        template that insists on the turn's tool calls gets the turn itself, and must then only ever add to
        what it wrote before.
        """
        stand_in = [
            *messages[:after],
            {"role": "assistant", "content": SENTINEL},
            *messages[after + 1 : upto],
        ]
        try:
            parts = self.render(stand_in, tools, prompt=True, thinking=thinking).split(SENTINEL)
        except TrainingError:
            parts = []
        if len(parts) == 2:
            return parts[1]
        done = self.render(messages[: after + 1], tools, thinking=thinking)
        whole = self.render(messages[:upto], tools, prompt=True, thinking=thinking)
        if not whole.startswith(done):
            raise TrainingError(
                "the chat template rewrites earlier turns, so generated tokens cannot be placed in it"
            )
        return self.end_of_turn + whole[len(done) :]

    def answer(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, at: int) -> str:
        """The text of the assistant's turn ``at``, as if the model were to write it: header excluded, end included."""
        start = self.render(messages[:at], tools, prompt=True)
        whole = self.render(messages[: at + 1], tools)
        if not whole.startswith(start):
            raise TrainingError(
                "the chat template does not write a turn after the header it announces it with"
            )
        return whole[len(start) :]

    def span(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, at: int, text: str
    ) -> tuple[int, int]:
        """Where in ``text``, the whole conversation, the assistant's turn ``at`` stands, its end included."""
        start = self.render(messages[:at], tools, prompt=True)
        done = self.render(messages[: at + 1], tools)
        if text.startswith(done) and done.startswith(start):
            return len(start), len(done)
        stand_in = [*messages[:at], messages[at] | {"content": SENTINEL}, *messages[at + 1 :]]
        head, found, tail = self.render(stand_in, tools).partition(SENTINEL)
        stop = tail.find(self.end_of_turn.strip())
        if not found or not text.startswith(head) or not text.endswith(tail) or stop < 0:
            raise TrainingError("the chat template hides where the assistant's turns are")
        return len(head), len(text) - len(tail) + stop + len(self.end_of_turn.strip())

    def through_end(self, ids: list[int]) -> list[int]:
        """The tokens of a turn up to its last end-of-turn token; all of them when there is none."""
        last = max((place for place, token in enumerate(ids) if token in self.ends), default=len(ids) - 1)
        return ids[: last + 1]

    def without_end(self, ids: list[int]) -> list[int]:
        """The tokens that follow a turn, less the end of the turn that they begin with."""
        place = next((place for place, token in enumerate(ids[:4]) if token in self.ends), None)
        return ids if place is None else ids[place + 1 :]

    @cached_property
    def vocabulary(self) -> dict[bytes, int]:
        """Each token by the bytes that it stands for; of several, the one with the lowest id."""
        tokens = Vocabulary(self.tokenizer)
        return {tokens.bytes_of(token): token for token in reversed(range(tokens.size))}

    def _end_tokens(self) -> frozenset[int]:
        """What ends a turn: the model's end-of-sequence tokens, and the special one that the template writes."""
        ends: set[int] = set()
        for source in (
            self.tokenizer,
            self.base.model.config,
            getattr(self.base.model, "generation_config", None),
        ):
            found = getattr(source, "eos_token_id", None)
            ends |= set(found) if isinstance(found, list | tuple) else {found} if found is not None else set()
        written = self.encode(self.end_of_turn)[:1]
        return frozenset(ends | (set(written) & set(self.tokenizer.all_special_ids)))


def template_message(message: Mapping[str, Any]) -> Message:
    """A message as templates expect it: no nulls, text instead of parts, tool arguments as objects."""
    plain = {name: value for name, value in message.items() if value is not None}
    plain["content"] = _text(plain.get("content", ""))
    if calls := plain.pop("tool_calls", None):
        plain["tool_calls"] = [_call(call) for call in calls]
    return plain


def template_tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Tools as templates expect them; none at all when the list is empty."""
    return [
        tool if "type" in tool else {"type": "function", "function": tool} for tool in tools or []
    ] or None


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(_is_text(part) for part in content):
        return "".join(part[part["type"]] for part in content)
    raise TrainingError("a message's content must be text; images and audio cannot be trained on")


def _is_text(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind in ("text", "refusal") and isinstance(part.get(kind), str)


def _call(call: Any) -> Any:
    """A tool call with its arguments as an object where they are one, as servers render them."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise TrainingError("a tool call must have a function with a name and arguments")
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            parsed = json.loads(function["arguments"] or "{}")
        except json.JSONDecodeError:
            parsed = None
        if isinstance(parsed, dict):
            function["arguments"] = parsed
    return call | {"function": function}
