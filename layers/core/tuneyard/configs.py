"""How to train: the fields of ``experimental_config`` and ``config``, and a model's LoRA settings.

A key that is present with null means its default. An unknown field is refused, and the error lists the known ones.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

Rate = Annotated[FiniteFloat, Field(ge=0)]
UNSUPPORTED = {
    "scale_learning_rate_by_reward_std_dev": "scale_learning_rate_by_reward_std_dev is not supported; leave it out.",
}
"""Options of ``RLConfig`` that are known and refused, each with the sentence that says so."""
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Config(BaseModel):
    """A set of options: null is the default, an unknown name is an error that lists the known ones."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        unknown = sorted(set(values) - set(cls.model_fields))
        if unknown:
            known = ", ".join(sorted(cls.model_fields))
            raise ValueError(f"unknown field {', '.join(map(repr, unknown))}; the known fields are: {known}")
        return {name: value for name, value in values.items() if value is not None}


class LoraSettings(Config):
    """The adapter of a model: low-rank updates W + (alpha / rank) B A on the target modules."""

    rank: int = Field(8, ge=1, le=512)
    alpha: Annotated[FiniteFloat, Field(gt=0)] = 16.0
    target_modules: tuple[str, ...] = LORA_TARGETS
    dropout: FiniteFloat = Field(0.0, ge=0, lt=1)
    seed: int = Field(0, ge=0, lt=2**32)


class RLConfig(Config):
    """One RL job's options; the formulas that they steer are in docs/training.md."""

    learning_rate: Rate | None = None
    loss_fn: Literal["cispo", "ppo"] | None = None
    ppo: bool | None = None
    epsilon: FiniteFloat | None = Field(None, ge=0)
    epsilon_high: FiniteFloat | None = Field(None, ge=0)
    advantage_balance: FiniteFloat = Field(0.0, ge=-1, le=1)
    scale_rewards: bool = True
    normalize_advantages: bool | None = None
    importance_sampling_level: Literal["token", "sequence", "average", "geometric_average"] = "token"
    max_negative_advantage_importance_sampling_weight: FiniteFloat | None = Field(None, gt=0)
    mask_prob_ratio: bool = False
    kimi_k2_tau: FiniteFloat | None = Field(None, ge=0)
    kl_penalty_coef: FiniteFloat = Field(0.0, ge=0)
    kl_penalty_reference_step: int | None = Field(None, ge=0)
    kl_penalty_step_lag: int | None = Field(None, ge=0)
    kl_penalty_source: Literal["current_learner", "sample"] = "current_learner"
    kl_ref_adapter_path: str | None = None
    precalculate_logprobs: bool = False
    truncated_importance_sampling: FiniteFloat | None = Field(None, gt=0)
    allow_training_without_logprobs: bool = False
    packed_sequence_length: int | None = Field(None, ge=1)
    num_trajectories_learning_rate_multiplier_power: FiniteFloat = 0.0
    scale_learning_rate_by_reward_std_dev: bool = False
    logprob_calculation_chunk_size: int = Field(1024, ge=1)
    plot_tensors: bool = False

    @model_validator(mode="after")
    def _settle_switches(self) -> Self:
        """Resolve the two spellings of one switch, and the defaults that depend on it."""
        if self.ppo is not None and self.loss_fn is not None and self.ppo != (self.loss_fn == "ppo"):
            raise ValueError(
                f"ppo={self.ppo} and loss_fn={self.loss_fn!r} contradict each other; send one of them"
            )
        ppo = bool(self.ppo) or self.loss_fn == "ppo"
        if (
            self.normalize_advantages is False
            and "scale_rewards" in self.model_fields_set
            and self.scale_rewards
        ):
            raise ValueError("normalize_advantages=false means scale_rewards=false; send one of them")
        references = ("kl_penalty_reference_step", "kl_penalty_step_lag", "kl_ref_adapter_path")
        if len(given := [name for name in references if getattr(self, name) is not None]) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other; send one of them")
        scale = self.scale_rewards and self.normalize_advantages is not False
        epsilon = self.epsilon if self.epsilon is not None else (0.2 if ppo else 1.0)
        high_default = epsilon if ppo or self.epsilon is not None else 4.0
        high = self.epsilon_high if self.epsilon_high is not None else high_default
        settled = {
            "ppo": ppo,
            "loss_fn": "ppo" if ppo else "cispo",
            "epsilon": epsilon,
            "epsilon_high": high,
            "scale_rewards": scale,
            "normalize_advantages": scale,
        }
        for name, value in settled.items():
            object.__setattr__(self, name, value)
        return self


class SFTConfig(Config):
    """One SFT job's options."""

    batch_size: int | Literal["auto"] = "auto"
    learning_rate: Rate | list[Rate] | None = None

    @model_validator(mode="after")
    def _batch_size_is_positive(self) -> Self:
        if isinstance(self.batch_size, int) and self.batch_size < 1:
            raise ValueError('batch_size must be at least 1, or "auto"')
        return self

    @property
    def examples_per_batch(self) -> int:
        """``batch_size`` with "auto" resolved: 2."""
        return 2 if self.batch_size == "auto" else self.batch_size


class SFTExperimentalConfig(Config):
    """The ``experimental_config`` of an SFT job."""

    assistant_turns: Literal["all", "last"] = "all"
