"""vLLM's chat requests, answers and errors from ours and into ours. Pure: nothing here touches the network.

Written against vLLM's ``ChatCompletionRequest`` and ``chat_completion_stream_generator``; docs/decisions/0006 names the
commits. Its defaults come from the model's own generation settings, so every option of ours is spelled out.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tuneyard.completions import ChatRequest
from tuneyard.errors import (
    ApiError,
    ContextLengthExceeded,
    Invalid,
    ModelNotFound,
    TooLarge,
    TooManyRequests,
    Unavailable,
)

HONOURED = frozenset({"bad_words", "documents", "length_penalty", "reasoning_effort"})
"""Options that the embedded engine refuses and vLLM knows."""
PASSED = HONOURED | {
    "allowed_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "structured_outputs",
}
_OWN = frozenset(ChatRequest.model_fields) - {"user", "stream_options"}
_PROMPT = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
_LOCKED_OUT = (401, 403)
_GRAMMAR = re.compile("grammar|json.?schema|structured.output", re.IGNORECASE)
"""What vLLM calls a ``response_format`` by when it cannot compile it."""


def request_body(chat: ChatRequest, model: str) -> dict[str, Any]:
    """The body for vLLM. Streams carry running usage, so that one that breaks off can be booked."""
    body = chat.model_dump(mode="json", include=set(_OWN | PASSED), exclude_none=True)
    body |= {"model": model, "top_k": max(chat.top_k, 0)}
    if not chat.tools:
        del body["tools"]
        if chat.tool_choice in ("auto", "none"):
            del body["tool_choice"]
    if not chat.logprobs:
        body.pop("top_logprobs", None)
    if chat.stream:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return body


def tokenize_body(chat: ChatRequest, model: str) -> dict[str, Any]:
    """The body that asks vLLM for the tokens of the same prompt."""
    body = chat.model_dump(mode="json", include=set(_PROMPT), exclude_none=True)
    if not chat.tools:
        del body["tools"]
    return body | {"model": model}


class Reading:
    """One answer of vLLM's, read whole or chunk by chunk, as our clients see it."""

    def __init__(self, chat: ChatRequest) -> None:
        self._chat = chat
        self._called: set[int] = set()
        self._written: dict[int, int] = {}
        self.prompt_tokens = 0

    @property
    def completion_tokens(self) -> int:
        """The tokens written so far, in all choices."""
        return sum(self._written.values())

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        """A ``chat.completion``, under the name that the client called the model by."""
        self.prompt_tokens = body["usage"]["prompt_tokens"]
        self._written = {0: body["usage"]["completion_tokens"]}
        choices = [self._choice(choice, choice["message"]) for choice in body["choices"]]
        return _present(body) | {"model": self._chat.model, "choices": choices}

    def chunk(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """A ``chat.completion.chunk``, or None for one that the client did not ask for."""
        usage = body.pop("usage", None)
        choices = [self._choice(choice, choice["delta"]) for choice in body["choices"]]
        if usage is not None:
            self.prompt_tokens = usage["prompt_tokens"]
            if choices:  # the running count of vLLM is that of the one choice in the chunk
                self._written[choices[0]["index"]] = usage["completion_tokens"]
        wants = self._chat.stream_options
        if wants is None or not wants.include_usage:
            told = {}
        elif choices:
            told = {"usage": self._usage() if wants.continuous_usage_stats else None}
        else:
            told = {"usage": usage}
        if not (choices or told):
            return None
        return _present(body) | {"model": self._chat.model, "choices": choices} | told

    def _choice(self, choice: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
        """A choice; one that calls tools ends with ``tool_calls``, also where vLLM says ``stop`` for a named tool."""
        if said.get("tool_calls"):
            self._called.add(choice["index"])
        kept = {"logprobs": None, "finish_reason": None} | _present(choice)
        if kept["finish_reason"] == "stop" and choice["index"] in self._called:
            kept["finish_reason"] = "tool_calls"
        return kept

    def _usage(self) -> dict[str, int]:
        read, written = self.prompt_tokens, self.completion_tokens
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def error(status: int, content: bytes | str) -> ApiError:
    """What a client of ours is told when vLLM answers like this, or says it in the middle of a stream."""
    message, param = told(content)
    if "maximum context length" in message:
        return ContextLengthExceeded(message, param="messages")
    match status:
        case 400 | 422:
            if param is None and _GRAMMAR.search(message):
                param = "response_format"
            return Invalid(message or "vLLM does not take this request.", param=param)
        case 404:
            return ModelNotFound(message or "vLLM does not serve this model.", param="model")
        case 413:
            return TooLarge(message)
        case 429:
            return TooManyRequests(message or "vLLM takes no more requests now.", retry_after=1)
        case 502 | 503 | 504:
            return Unavailable(message or "vLLM is not ready.", retry_after=5)
        case _ if status in _LOCKED_OUT:
            return Unavailable("vLLM does not take the inference service's key.", retry_after=60)
    return ApiError("The inference engine failed on this request. Try again, or report it.")


def told(content: bytes | str) -> tuple[str, str | None]:
    """The message and the parameter of an error body, as vLLM writes it now and as it wrote it before."""
    try:
        body = json.loads(content)
    except ValueError:
        return "", None
    inner = body.get("error", body) if isinstance(body, dict) else {}
    if not isinstance(inner, dict):
        return str(inner), None
    return str(inner.get("message") or ""), inner.get("param")


def _present(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}
