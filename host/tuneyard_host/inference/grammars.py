"""Answers that must have a form: JSON, a JSON schema, a regular expression, a choice, a tool call.

The form is compiled to a grammar that names the tokens allowed next (llguidance). The recorded log-probabilities stay
those of the model's own distribution, in which the other tokens are possible too.
"""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tuneyard.completions import ChatRequest
from tuneyard.errors import Invalid
from tuneyard_host.bases import Base

from .texts import CLOSE, OPEN, Vocabulary

PLAIN_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as ``json.dumps`` writes it; free white space is where small models get lost."""
FORMS = ("json", "json_object", "regex", "choice", "grammar")


class Grammar:
    """Where one answer stands in its form."""

    def __init__(self, matcher: Any, param: str) -> None:
        self._matcher, self.param = matcher, param

    def copy(self) -> Grammar:
        """The same form at the same point, for another choice."""
        return Grammar(self._matcher.deep_copy(), self.param)

    def mask(self, logits: Tensor) -> Tensor:
        """Logits (V,) with minus infinity on every token that would leave the form."""
        allowed = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8)[: len(logits)] != 0
        mask = torch.zeros(len(logits), dtype=torch.bool)
        mask[: len(allowed)] = torch.from_numpy(allowed)
        return logits.masked_fill(~mask.to(logits.device), -torch.inf)

    def advance(self, token: int) -> None:
        """Take the token that was drawn."""
        self._matcher.consume_token(token)

    @property
    def error(self) -> str:
        """Why the form can be followed no further; "" while it can."""
        return self._matcher.get_error().splitlines()[0] if self._matcher.is_error() else ""

    @property
    def complete(self) -> bool:
        """Whether nothing but the end of the turn can follow."""
        return bool(self._matcher.is_stopped())


class Encoder:
    """The tokenizer as llguidance wants it; its own reader of Hugging Face files takes tool tags for special tokens."""

    bos_token_id = None

    def __init__(self, base: Base, vocabulary: Vocabulary, ends: frozenset[int]) -> None:
        self.eos_token_id = min(ends)
        self.tokens = [vocabulary.bytes_of(token) for token in range(base.model.config.vocab_size)]
        self.special_token_ids = sorted(vocabulary.special)
        self._inner = base.tokenizer.backend_tokenizer

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text."""
        tokens: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return tokens


class Grammars:
    """Compiles forms for one base model's vocabulary."""

    def __init__(self, base: Base, vocabulary: Vocabulary, ends: frozenset[int]) -> None:
        self._base, self._texts, self._ends = base, vocabulary, ends
        self._known: Any = None
        self._lock = threading.Lock()

    def of(self, chat: ChatRequest) -> Grammar | None:
        """The form that a request asks for, or None; Invalid when it is not one that can be followed."""
        from llguidance import LLMatcher

        form = _form(chat)
        if form is None:
            return None
        param, rules = form
        matcher = LLMatcher(self._vocabulary(), LLMatcher.grammar_from_lark(rules), log_level=0)
        if matcher.is_error():
            raise Invalid(f"{param} cannot be followed: {matcher.get_error().splitlines()[0]}", param=param)
        return Grammar(matcher, param)

    def _vocabulary(self) -> Any:
        """Built when first needed, as it takes a second for large vocabularies."""
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._lock:
            if self._known is None:
                encoder = TokenizerWrapper(Encoder(self._base, self._texts, self._ends))
                self._known = LLTokenizer(encoder, eos_token=sorted(self._ends))
            return self._known


def _form(chat: ChatRequest) -> tuple[str, str] | None:
    """The option that asks for a form, and the rules of its grammar in Lark."""
    calls = _calls(chat)
    if calls is not None and chat.tool_choice not in (None, "auto"):
        return "tool_choice", f"start: calls\n{calls}"
    content = _content(chat)
    if content is None:
        return None
    param, rules = content
    if calls is not None and param == "response_format":  # structured_outputs is about the answer as written
        return param, f"start: content | calls\n{rules}{calls}"
    return param, f"start: content\n{rules}"


def _content(chat: ChatRequest) -> tuple[str, str] | None:
    """The form of the text: the option's name and the rule ``content``."""
    wanted: dict[str, Any] = (chat.model_extra or {}).get("structured_outputs") or {}
    asked = {name: value for name, value in wanted.items() if value not in (None, False)}
    param = "structured_outputs"
    if chat.response_format is not None and chat.response_format.get("type") != "text":
        if asked:
            raise Invalid("response_format and structured_outputs exclude each other.", param=param)
        param, asked = "response_format", _response_format(chat.response_format)
    if not asked:
        return None
    unknown = [name for name in asked if name not in FORMS]
    if unknown or len(asked) > 1:
        raise Invalid(f"{param} takes one of {', '.join(FORMS)}, not {', '.join(asked)}.", param=param)
    match asked:
        case {"json": str() | dict() | bool() as schema}:
            return param, f"content: {_json(_schema(schema, param))}\n"
        case {"json_object": True}:
            return param, f"content: {_json({'type': 'object'})}\n"
        case {"regex": str() as regex}:
            return param, f"content: /{_slashes(regex)}/\n"
        case {"choice": [str(), *_] as options}:
            return param, f"content: {' | '.join(json.dumps(str(option)) for option in options)}\n"
        case {"grammar": str() as rules}:
            return param, re.sub(r"^\s*start\s*:", "content:", rules, count=1, flags=re.M) + "\n"
    raise Invalid(f"{param} has a value of the wrong type.", param=param)


def _response_format(wanted: dict[str, Any]) -> dict[str, Any]:
    match wanted:
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return {"json": schema}
        case {"type": "json_schema"}:
            raise Invalid(
                "response_format of type 'json_schema' needs json_schema.schema.", param="response_format"
            )
    raise Invalid(
        f"response_format of type {wanted.get('type')!r} is not known; text, json_object and json_schema are.",
        param="response_format",
    )


def _calls(chat: ChatRequest) -> str | None:
    """The rules of ``calls``: one tool call, or several when they may be parallel; None without tools."""
    if not chat.tools or chat.tool_choice == "none":
        return None
    functions = [tool["function"] for tool in chat.tools]
    if isinstance(chat.tool_choice, dict):
        name = (chat.tool_choice.get("function") or {}).get("name")
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise Invalid(f"tool_choice names {name!r}, which is not among the tools.", param="tool_choice")
    elif chat.tool_choice not in (None, "auto", "required"):
        raise Invalid(f"tool_choice {chat.tool_choice!r} is not known.", param="tool_choice")
    many = chat.parallel_tool_calls and not isinstance(chat.tool_choice, dict)
    rules = ['calls: call ("\\n" call)*' if many else "calls: call"]
    rules.append(f"call: {' | '.join(f'call{i}' for i in range(len(functions)))}")
    for i, function in enumerate(functions):
        start = f'{OPEN}\n{{"name": {json.dumps(function["name"])}, "arguments": '
        arguments = _json(function.get("parameters") or {"type": "object"})
        rules.append(f"call{i}: {json.dumps(start)} arguments{i} {json.dumps('}' + chr(10) + CLOSE)}")
        rules.append(f"arguments{i}: {arguments}")
    return "\n".join(rules) + "\n"


def _schema(schema: str | bool | dict[str, Any], param: str) -> dict[str, Any]:
    try:
        read = json.loads(schema) if isinstance(schema, str) else schema
    except ValueError as error:
        raise Invalid(f"{param} holds a JSON schema that is not JSON: {error}", param=param) from error
    return read if isinstance(read, dict) else {}


def _json(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps({"x-guidance": PLAIN_JSON, **schema})


def _slashes(regex: str) -> str:
    """A regular expression between slashes: its own, where not escaped already, are."""
    return re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], regex, flags=re.S)
