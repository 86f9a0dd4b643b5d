"""The client's request as the engine's task: token ids, how to sample, how to read the answer.

What cannot be honoured is refused here by name, before anything is queued; nothing is dropped in silence.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np

from tuneyard.completions import ChatRequest, Message
from tuneyard.errors import ContextLengthExceeded, Invalid
from tuneyard_host.bases import Base

from . import options
from .grammars import Grammars
from .sampling import Sampling, key
from .texts import Vocabulary

SHORT = 2000
"""Characters that are tokenised in a fraction of a millisecond."""


@dataclass(frozen=True)
class Task:
    """A request, ready for the engine: one sampling per choice."""

    prompt: np.ndarray
    samplings: list[Sampling]
    chat: ChatRequest
    stops: list[str]
    calls: bool
    """Whether the answer may hold tool calls."""

    def option(self, name: str, default: Any) -> Any:
        """An option of vLLM's that the contract does not spell out."""
        value = (self.chat.model_extra or {}).get(name)
        return default if value is None else value


def is_short(chat: ChatRequest) -> bool:
    """Whether it is planned in less time than it takes to hand it to a thread."""
    plain = not (chat.tools or chat.response_format or chat.chat_template_kwargs or chat.model_extra)
    sizes = [SHORT if message.tool_calls else 50 + len(message.content or "") for message in chat.messages]
    return plain and sum(sizes) < SHORT


def plan(
    chat: ChatRequest, base: Base, vocabulary: Vocabulary, ends: frozenset[int], grammars: Grammars
) -> Task:
    """Check the options, render and tokenise the messages, and settle how each choice is sampled."""
    options.refuse(chat)
    tools = _tools(chat)
    prompt = np.array(_tokenise(chat, base, tools), np.int32)
    most = _most(chat, len(prompt), base.context_length)
    extra = chat.model_extra or {}
    stop_tokens = frozenset(_tokens("stop_token_ids", chat.stop_token_ids, vocabulary))
    allowed = extra.get("allowed_token_ids")
    biased = _tokens("logit_bias", list(chat.logit_bias), vocabulary)
    grammar = grammars.of(chat)
    samplings = [
        Sampling(
            most=most,
            least=chat.min_tokens,
            ends=stop_tokens if chat.ignore_eos else stop_tokens | ends,
            temperature=chat.temperature,
            top_p=chat.top_p,
            top_k=chat.top_k,
            min_p=chat.min_p,
            key=key(chat.seed, choice),
            presence=chat.presence_penalty,
            frequency=chat.frequency_penalty,
            repetition=chat.repetition_penalty,
            bias=dict(zip(biased, chat.logit_bias.values(), strict=True)),
            allowed=None if allowed is None else _tokens("allowed_token_ids", allowed, vocabulary),
            grammar=grammar.copy() if grammar is not None else None,
            logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
            prompt_logprobs=chat.prompt_logprobs,
        )
        for choice in range(chat.n)
    ]
    return Task(prompt, samplings, chat, chat.stop, calls=bool(tools))


def _tools(chat: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools that the template shows, or None."""
    for tool in chat.tools:
        if tool.get("type") != "function" or not isinstance((tool.get("function") or {}).get("name"), str):
            raise Invalid("Each of tools must be of type 'function' and have a function.name.", param="tools")
    if not chat.tools and chat.tool_choice not in (None, "auto", "none"):
        raise Invalid("tool_choice asks for a call, and there are no tools.", param="tool_choice")
    return chat.tools if chat.tools and chat.tool_choice != "none" else None


def _tokenise(chat: ChatRequest, base: Base, tools: list[dict[str, Any]] | None) -> list[int]:
    messages = [_plain(message) for message in chat.messages]
    for name in chat.chat_template_kwargs:
        if name in inspect.signature(base.tokenizer.apply_chat_template).parameters:
            raise Invalid(f"chat_template_kwargs cannot set {name!r}.", param="chat_template_kwargs")
    try:
        text = base.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            **chat.chat_template_kwargs,
        )
    except (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise Invalid(
            f"The model's chat template does not take these messages: {error}", param="messages"
        ) from error
    _refuse_endless(text, base)
    tokens: list[int] = base.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    if not tokens:
        raise Invalid("The prompt is empty.", param="messages")
    return tokens


def _refuse_endless(text: str, base: Base) -> None:
    """Refuse what is far too long by its beginning: ten megabytes would keep the tokenizer busy for minutes."""
    size, context = 16 * base.context_length, base.context_length
    while size < len(text):
        count = len(base.tokenizer.backend_tokenizer.encode(text[:size], add_special_tokens=False).ids)
        if count > 2 * context:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {context} tokens, and the prompt alone has more than "
                f"{2 * context}. Shorten the messages.",
                param="messages",
            )
        size *= 2


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates expect it: arguments of tool calls as objects, no keys without a value."""
    plain = message.model_dump(exclude_none=True)
    plain.setdefault("content", "")
    for call in plain.get("tool_calls", ()):
        function = call.get("function") or {}
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except ValueError:
                continue  # a call that a model wrote badly is shown to it as it wrote it
    return plain


def _most(chat: ChatRequest, length: int, context: int) -> int:
    """How many tokens a choice may have; ContextLengthExceeded when prompt and answer do not fit."""
    if length >= context:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {context} tokens, and the prompt alone has {length}. "
            "Shorten the messages.",
            param="messages",
        )
    if chat.limit is None:
        return context - length
    if length + chat.limit > context:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {context} tokens: the prompt's {length} and the {chat.limit} "
            "asked for do not fit. Shorten the messages or lower max_tokens.",
            param="max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens",
        )
    return chat.limit


def _tokens(name: str, values: Any, vocabulary: Vocabulary) -> list[int]:
    """Token ids out of an option, checked."""
    try:
        tokens = [int(value) for value in values]
    except (TypeError, ValueError) as error:
        raise Invalid(f"{name} must hold token ids.", param=name) from error
    if not tokens and name == "allowed_token_ids":
        raise Invalid("allowed_token_ids must not be empty.", param=name)
    wrong = [token for token in tokens if not 0 <= token < vocabulary.size]
    if wrong:
        raise Invalid(
            f"{name}: {wrong[0]} is no token of this model (0 to {vocabulary.size - 1}).", param=name
        )
    return tokens
