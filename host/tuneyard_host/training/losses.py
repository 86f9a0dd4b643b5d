"""The objectives, as pure functions over the trained tokens of one row.

Every tensor is (M,): one entry for each token that a history trains on, in any order. The formulas, and the
order of the steps, are those of docs/training.md; the open reference is openpipe-art's ``art/loss.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from tuneyard.configs import RLConfig


@dataclass
class Terms:
    """What is known of each trained token besides the model's own log-probability; NaN means unknown."""

    advantage: Tensor
    """(M,) A_t, already normalised over the job."""
    weight: Tensor
    """(M,) w_t, already normalised over the job."""
    old: Tensor
    """(M,) log p_old: the denominator of the ratio."""
    sampler: Tensor
    """(M,) what the rollout recorded; differs from ``old`` only after ``precalculate_logprobs``."""
    history: Tensor
    """(M,) which history a token belongs to, counted from 0."""
    num_histories: int
    reference: Tensor | None = None
    """(M,) log p_ref, when there is a KL penalty."""
    count: int | None = None
    """How many trained tokens the row has of which these are a part; None for a whole row."""
    mean_divergence: float | None = None
    """The mean of log p - log p_ref over that row; None for a whole row, which has it at hand."""

    def part(
        self, where: Tensor, history: Tensor, num_histories: int, mean_divergence: float | None
    ) -> Terms:
        """The terms of those tokens that ``where`` (M,) picks, whose histories are counted anew."""
        picked = {
            name: value[where]
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and name != "history"
        }
        return replace(
            self,
            **picked,
            history=history,
            num_histories=num_histories,
            count=len(self.advantage),
            mean_divergence=mean_divergence,
        )


def policy_loss(new: Tensor, terms: Terms, config: RLConfig) -> tuple[Tensor, dict[str, float]]:
    """The loss of one row, sum_t w_t l_t / M, and what to tell about it.

    ``new`` is log p_theta (M,), the only tensor that carries a gradient.
    """
    low, high = 1 - cast(float, config.epsilon), 1 + cast(float, config.epsilon_high)  # settled by RLConfig
    old = torch.where(terms.old.isnan(), new.detach(), terms.old)
    difference = new - old
    ratio = importance_ratio(difference, terms, level=config.importance_sampling_level)
    advantage = terms.advantage
    told = _measure(ratio, low=low, high=high) | {"x/kl_old": -mean(difference)}

    if (most := config.max_negative_advantage_importance_sampling_weight) is not None:
        ratio = torch.where(advantage < 0, ratio.clamp(max=most), ratio)
    inside = torch.ones_like(ratio)
    if config.mask_prob_ratio:
        inside = ((ratio > low) & (ratio < high)).to(ratio)
        told["x/masked_fraction"] = 1 - mean(inside)
    if config.kimi_k2_tau is not None:
        advantage = advantage - config.kimi_k2_tau * difference.detach()
    if terms.reference is not None:
        divergence = divergences(new, terms, config)
        level = divergence.mean() if terms.mean_divergence is None else terms.mean_divergence
        advantage = advantage + config.kl_penalty_coef * (level - divergence)
        told["kl_policy_ref"] = mean(divergence)

    if config.ppo:
        per_token = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    else:
        per_token = -ratio.detach().clamp(low, high) * advantage * new
    if (most := config.truncated_importance_sampling) is not None:
        per_token = per_token * truncated_weight(ratio, terms, config, most=most)
    count = len(new) if terms.count is None else terms.count
    return (inside * terms.weight * per_token).sum() / max(count, 1), told


def divergences(new: Tensor, terms: Terms, config: RLConfig) -> Tensor:
    """k (M,) = log p - log p_ref, without a gradient; p is the present policy's or, where asked, the sampler's."""
    if terms.reference is None:
        return torch.zeros_like(new)
    known = terms.sampler if config.kl_penalty_source == "sample" else new
    return torch.where(known.isnan(), new, known).detach() - terms.reference


def importance_ratio(difference: Tensor, terms: Terms, *, level: str) -> Tensor:
    """rho (M,) from d = log p_theta - log p_old: per token, or per history as exp(mean d), or a mean of both."""
    token = difference.exp()
    if level == "token":
        return token
    sums = difference.new_zeros(terms.num_histories).index_add(0, terms.history, difference)
    counts = torch.bincount(terms.history, minlength=terms.num_histories).clamp(min=1)
    sequence = (sums / counts).exp()[terms.history]
    match level:
        case "sequence":
            return sequence
        case "average":
            return (token + sequence) / 2
        case _:
            return (token * sequence).sqrt()


def ratio_sums(new: Tensor, terms: Terms) -> list[float]:
    """For each history, the sum of p_theta / p_old over its trained tokens."""
    old = torch.where(terms.old.isnan(), new.detach(), terms.old)
    ratios = (new.detach() - old).exp().nan_to_num()
    return ratios.new_zeros(terms.num_histories).index_add(0, terms.history, ratios).tolist()


def truncated_weight(ratio: Tensor, terms: Terms, config: RLConfig, *, most: float) -> Tensor:
    """detach(min(rho', C)): rho' = p_old / p_sampler where old was re-scored, else rho itself."""
    if config.precalculate_logprobs:
        ratio = (terms.old - torch.where(terms.sampler.isnan(), terms.old, terms.sampler)).exp()
    return ratio.detach().clamp(max=most)


def cross_entropy(new: Tensor, *, count: int) -> Tensor:
    """SFT: -(1/T_B) sum log p over the (M,) trained tokens of a part of a batch that trains on ``count`` in all."""
    return -new.sum() / max(count, 1)


def _measure(ratio: Tensor, *, low: float, high: float) -> dict[str, float]:
    ratio = ratio.detach()
    return {
        "x/clip_fraction": mean(((ratio < low) | (ratio > high)).float()),
        "x/ratio_min": finite(ratio.min()) if len(ratio) else 1.0,
        "x/ratio_mean": mean(ratio),
        "x/ratio_max": finite(ratio.max()) if len(ratio) else 1.0,
    }


def mean(values: Tensor) -> float:
    """The mean as a finite Python float."""
    return finite(values.detach().mean())


def finite(value: Tensor) -> float:
    """A number that JSON can hold: a ratio that overflowed becomes the largest there is."""
    return float(value.nan_to_num())
