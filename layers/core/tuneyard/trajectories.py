"""What a client sends to train on: trajectories in groups, as the ART client writes them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat


def _number(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a finite number")
    return value


def _message_or_choice(value: object) -> object:
    if not isinstance(value, dict):
        raise ValueError("must be a chat message (with `role`) or a choice (with `message` and `index`)")
    if isinstance(value.get("role"), str):
        return value
    if isinstance(value.get("message"), dict) and "index" in value:
        return value
    raise ValueError("must be a chat message (with `role`) or a choice (with `message` and `index`)")


Number = Annotated[FiniteFloat, BeforeValidator(_number)]
MessageOrChoice = Annotated[dict[str, Any], BeforeValidator(_message_or_choice)]


class History(BaseModel):
    """One conversation: messages that were sent, and choices that the model generated."""

    model_config = ConfigDict(extra="allow")

    messages_and_choices: list[MessageOrChoice]
    tools: list[dict[str, Any]] | None = None


class Trajectory(BaseModel):
    """One rollout with its reward; ``additional_histories`` train with the same advantage."""

    model_config = ConfigDict(extra="allow")

    messages_and_choices: list[MessageOrChoice]
    reward: Number
    tools: list[dict[str, Any]] | None = None
    additional_histories: list[History] = Field(default_factory=list)
    metrics: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)

    @property
    def histories(self) -> list[History]:
        """The trajectory's own history first, then its additional ones."""
        own = History(messages_and_choices=self.messages_and_choices, tools=self.tools)
        return [own, *self.additional_histories]


class TrajectoryGroup(BaseModel):
    """Rollouts of one prompt: their rewards are compared with each other and with no others."""

    model_config = ConfigDict(extra="allow")

    trajectories: list[Trajectory]
    exceptions: list[dict[str, Any]] = Field(default_factory=list)
    metadata: dict[str, Any] = Field(default_factory=dict)
    metrics: dict[str, Any] = Field(default_factory=dict)


def is_choice(item: dict[str, Any]) -> bool:
    """Whether an element of ``messages_and_choices`` is a choice that a model generated."""
    return "message" in item and "role" not in item
