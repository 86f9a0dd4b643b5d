"""Each formula of the RL loss against a twin that loops over tokens in plain Python."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tuneyard.configs import RLConfig
from tuneyard_host.training.losses import Terms, cross_entropy, policy_loss


@dataclass
class Token:
    """One trained token, as the slow twin sees it."""

    new: float
    old: float
    sampler: float
    reference: float
    advantage: float
    weight: float
    history: int


def tokens(seed: int, *, rescored: bool = False) -> list[Token]:
    """Three histories of a row; some log-probabilities were not recorded."""
    rng = random.Random(seed)
    made = []
    for history, length in enumerate([5, 1, 9]):
        advantage = rng.choice([-1, 1]) * rng.uniform(0.2, 2)
        for _ in range(length):
            new = rng.uniform(-4, -0.1)
            sampler = math.nan if rng.random() < 0.15 else new + rng.gauss(0, 0.7)
            old = new + rng.gauss(0, 0.3) if rescored else sampler
            made.append(
                Token(new, old, sampler, new + rng.gauss(0, 0.5), advantage, rng.uniform(0.3, 2), history)
            )
    return made


def slow_loss(row: list[Token], config: RLConfig, *, moved: dict[int, float] | None = None) -> float:
    """The page's formulas, token after token. ``moved`` shifts log p_theta where the gradient flows, and only there."""
    moved = moved or {}
    low, high = 1 - config.epsilon, 1 + config.epsilon_high

    def live(t: int) -> float:
        return row[t].new + moved.get(t, 0.0)

    def old(t: int) -> float:
        return row[t].new if math.isnan(row[t].old) else row[t].old

    def rho(t: int, value: Any) -> float:
        token = math.exp(value(t) - old(t))
        mine = [s for s in range(len(row)) if row[s].history == row[t].history]
        sequence = math.exp(sum(value(s) - old(s) for s in mine) / len(mine))
        return {
            "token": token,
            "sequence": sequence,
            "average": (token + sequence) / 2,
            "geometric_average": math.sqrt(token * sequence),
        }[config.importance_sampling_level]

    def clip(value: float) -> float:
        return min(max(value, low), high)

    divergence = []
    for token in row:
        known = token.sampler if config.kl_penalty_source == "sample" else token.new
        divergence.append((token.new if math.isnan(known) else known) - token.reference)
    mean_divergence = sum(divergence) / len(row)

    total = 0.0
    for t, token in enumerate(row):
        ratio, frozen = rho(t, live), rho(t, lambda s: row[s].new)
        if config.max_negative_advantage_importance_sampling_weight and token.advantage < 0:
            ratio = min(ratio, config.max_negative_advantage_importance_sampling_weight)
            frozen = min(frozen, config.max_negative_advantage_importance_sampling_weight)
        if config.mask_prob_ratio and not low < frozen < high:
            continue
        advantage = token.advantage
        if config.kimi_k2_tau:
            advantage -= config.kimi_k2_tau * (token.new - old(t))
        if config.kl_penalty_coef:
            advantage += config.kl_penalty_coef * (mean_divergence - divergence[t])
        clipped = -clip(frozen) * advantage * live(t)
        loss = -min(ratio * advantage, clip(ratio) * advantage) if config.ppo else clipped
        if config.truncated_importance_sampling:
            if config.precalculate_logprobs:
                frozen = 1.0 if math.isnan(token.sampler) else math.exp(token.old - token.sampler)
            loss *= min(frozen, config.truncated_importance_sampling)
        total += token.weight * loss
    return total / len(row)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"epsilon": 0.3},
    {"epsilon": 0.2, "epsilon_high": 0.5},
    {"ppo": True},
    {"loss_fn": "ppo", "epsilon": 0.3, "epsilon_high": 0.1},
    {"importance_sampling_level": "sequence"},
    {"importance_sampling_level": "average"},
    {"importance_sampling_level": "geometric_average"},
    {"ppo": True, "importance_sampling_level": "sequence"},
    {"ppo": True, "importance_sampling_level": "average"},
    {"ppo": True, "importance_sampling_level": "geometric_average"},
    {"max_negative_advantage_importance_sampling_weight": 0.9},
    {"ppo": True, "max_negative_advantage_importance_sampling_weight": 0.9},
    {"mask_prob_ratio": True, "epsilon": 0.2},
    {"ppo": True, "mask_prob_ratio": True},
    {"kimi_k2_tau": 0.4},
    {"kl_penalty_coef": 0.3},
    {"kl_penalty_coef": 0.3, "kl_penalty_source": "sample"},
    {"ppo": True, "kl_penalty_coef": 0.3, "kimi_k2_tau": 0.1},
    {"truncated_importance_sampling": 0.8},
    {"truncated_importance_sampling": 0.8, "precalculate_logprobs": True},
    {
        "precalculate_logprobs": True,
        "ppo": True,
        "truncated_importance_sampling": 1.5,
        "kl_penalty_coef": 0.1,
    },
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_those_of_the_page(options: dict[str, Any], seed: int):
    config = RLConfig(**options)
    row = tokens(seed, rescored=config.precalculate_logprobs)
    new = torch.tensor([token.new for token in row], dtype=torch.float64, requires_grad=True)

    loss, told = policy_loss(new, terms(row, config), config)
    loss.backward()

    assert loss.item() == pytest.approx(slow_loss(row, config), rel=1e-5)
    step = 1e-6
    slopes = [
        (slow_loss(row, config, moved={t: step}) - slow_loss(row, config, moved={t: -step})) / (2 * step)
        for t in range(len(row))
    ]
    assert new.grad is not None
    torch.testing.assert_close(new.grad, torch.tensor(slopes, dtype=torch.float64), rtol=1e-5, atol=1e-8)
    assert all(math.isfinite(value) for value in told.values())


def terms(row: list[Token], config: RLConfig) -> Terms:
    """The row as the fast path sees it."""

    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(token, name) for token in row], dtype=torch.float64)

    return Terms(
        advantage=column("advantage"),
        weight=column("weight"),
        old=column("old"),
        sampler=column("sampler"),
        history=torch.tensor([token.history for token in row]),
        num_histories=3,
        reference=column("reference") if config.kl_penalty_coef else None,
    )


def test_what_is_told_is_what_happened():
    row = [
        Token(math.log(p), math.log(q), math.log(q), 0, 1, 1, 0)
        for p, q in [(0.5, 0.5), (0.9, 0.5), (0.1, 0.5)]
    ]
    config = RLConfig(ppo=True, mask_prob_ratio=True)

    _, told = policy_loss(torch.tensor([token.new for token in row]), terms(row, config), config)

    assert told["x/ratio_min"] == pytest.approx(0.2, rel=1e-5)
    assert told["x/ratio_mean"] == pytest.approx((1 + 1.8 + 0.2) / 3, rel=1e-5)
    assert told["x/ratio_max"] == pytest.approx(1.8, rel=1e-5)
    assert told["x/clip_fraction"] == pytest.approx(2 / 3)
    assert told["x/masked_fraction"] == pytest.approx(2 / 3)


def test_the_penalty_moves_credit_and_adds_none():
    config = RLConfig(kl_penalty_coef=0.5)
    row = [Token(-1.0, -1.0, -1.0, reference, 0.0, 1.0, 0) for reference in (-0.5, -1.0, -2.5)]
    new = torch.tensor([-1.0] * 3, requires_grad=True)

    loss, told = policy_loss(new, terms(row, config), config)
    loss.backward()

    assert told["kl_policy_ref"] == pytest.approx((-0.5 + 0 + 1.5) / 3)
    assert new.grad is not None
    assert float(new.grad.sum()) == pytest.approx(0, abs=1e-6)
    assert new.grad[2] > 0 > new.grad[0]


def test_missing_logprobs_count_as_the_present_policys():
    row = [Token(-1.0, math.nan, math.nan, 0, 1.0, 1.0, 0)]

    loss, told = policy_loss(torch.tensor([-1.0]), terms(row, RLConfig()), RLConfig())

    assert told["x/ratio_mean"] == 1.0
    assert float(loss) == 1.0


def test_cross_entropy_is_the_mean_over_the_batch_whatever_its_parts():
    parts = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-6.0])

    assert sum(float(cross_entropy(part, count=4)) for part in parts) == 3.0
