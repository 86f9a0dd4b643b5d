"""What a chat client sends: the vLLM superset of the OpenAI chat-completion request.

Unknown fields travel on untouched; a known option with a value that cannot be honoured is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, field_validator, model_validator

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
Probability = Annotated[FiniteFloat, Field(ge=0, le=1)]


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="allow")

    role: Role
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _parts_are_text(self) -> Message:
        """Join a list of text parts into one string; other kinds of parts are refused."""
        if isinstance(self.content, list):
            for part in self.content:
                if part.get("type") not in ("text", "refusal") or not isinstance(part.get(part["type"]), str):
                    raise ValueError("content parts must be of type text; images and audio are not supported")
            self.content = "".join(part[part["type"]] for part in self.content)
        return self


class StreamOptions(BaseModel):
    """What a stream carries besides its chunks."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool = False
    continuous_usage_stats: bool = False


class ChatRequest(BaseModel):
    """The body of ``POST /v1/chat/completions``. Null means default everywhere."""

    model_config = ConfigDict(extra="allow")

    model: Annotated[str, Field(min_length=1, max_length=1024)]
    messages: Annotated[list[Message], Field(min_length=1)]
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    min_p: Probability = 0.0
    n: Annotated[int, Field(ge=1, le=128)] = 1
    seed: int | None = None
    stop: list[str] = Field(default_factory=list, max_length=16)
    stop_token_ids: list[int] = Field(default_factory=list)
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    presence_penalty: Annotated[FiniteFloat, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[FiniteFloat, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[FiniteFloat, Field(gt=0)] = 1.0
    logit_bias: dict[str, Annotated[FiniteFloat, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    ignore_eos: bool = False
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _options_fit_each_other(self) -> ChatRequest:
        if self.top_logprobs and self.logprobs is False:
            raise ValueError("top_logprobs needs logprobs to be true")
        if self.continue_final_message and "add_generation_prompt" not in self.model_fields_set:
            self.add_generation_prompt = False
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        if self.min_tokens and self.limit is not None and self.min_tokens > self.limit:
            raise ValueError("min_tokens is larger than max_tokens")
        return self

    @property
    def limit(self) -> int | None:
        """The most tokens that one choice may have, or None for as many as the context holds."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class AdapterRef(BaseModel):
    """A checkpoint's adapter, as the inference service finds it: a key prefix in the bucket."""

    model_config = ConfigDict(frozen=True)

    checkpoint_id: str
    prefix: str


class EngineRequest(BaseModel):
    """What the chat door asks of the inference service: the client's request, with its model name resolved."""

    chat: ChatRequest
    base_model: str
    adapter: AdapterRef | None = None
    team: str
    project: str
    key_id: str = ""
