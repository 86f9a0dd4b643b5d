"""Options of OpenAI and vLLM beyond the contract: an engine honours them, or they are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from tuneyard.completions import ChatRequest
from tuneyard.errors import Invalid

REFUSED: dict[str, Callable[[Any], bool]] = {
    "add_special_tokens": bool,
    "audio": bool,
    "bad_words": bool,
    "best_of": lambda value: value != 1,
    "cache_salt": bool,
    "chat_template": bool,
    "documents": bool,
    "echo": bool,
    "function_call": lambda value: value != "none",
    "functions": bool,
    "guided_choice": lambda _: True,
    "guided_grammar": lambda _: True,
    "guided_json": lambda _: True,
    "guided_regex": lambda _: True,
    "kv_transfer_params": bool,
    "length_penalty": lambda value: value != 1,
    "logits_processors": bool,
    "mm_processor_kwargs": bool,
    "modalities": lambda value: value != ["text"],
    "priority": bool,
    "reasoning_effort": bool,
    "truncate_prompt_tokens": bool,
    "use_beam_search": bool,
    "verbosity": lambda value: value != "medium",
    "vllm_xargs": bool,
    "web_search_options": lambda _: True,
}
"""Options that would change an answer, and which values of theirs ask for something."""


def refuse(chat: ChatRequest, *, honoured: Container[str] = ()) -> None:
    """Raise Invalid for the first option that would change the answer and cannot."""
    for name, asks in REFUSED.items():
        value = (chat.model_extra or {}).get(name)
        if name not in honoured and value is not None and asks(value):
            raise Invalid(f"The option {name!r} is not supported by this inference engine.", param=name)
    if chat.prompt_logprobs is not None and chat.stream:
        raise Invalid("prompt_logprobs cannot be streamed.", param="prompt_logprobs")
    if chat.top_logprobs and not chat.logprobs:
        raise Invalid("top_logprobs needs logprobs to be true.", param="top_logprobs")
