"""Reinforcement learning from trajectory groups to an adapter: what each option does, and that a job is repeatable."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from training_fixtures import (  # noqa: F401
    LORA,
    assert_equal_gradients,
    base,
    choice,
    files,
    group,
    learner,
    one_thread,
    said,
    slow_gradients,
    slow_logprobs,
    twin,
    user,
)
from tuneyard.configs import RLConfig
from tuneyard.errors import TrainingError
from tuneyard.trajectories import TrajectoryGroup
from tuneyard_host.bases import Base
from tuneyard_host.training import batches, rl
from tuneyard_host.training.adapters import Learner, learner_for
from tuneyard_host.training.packing import build_row

RATE = 3e-3
ADAPTER = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def groups(base: Base) -> list[TrajectoryGroup]:
    """Three questions with three answers each, of several lengths, one with a second turn."""
    made = []
    for question in (
        "Answer yes, no or maybe.",
        "Pick a colour: red, green or blue.",
        "Say something short.",
    ):
        long = [
            user(question),
            said(base, "I would say maybe", logprob=-0.7),
            user("Sure?"),
            said(base, "yes"),
        ]
        short = [user(question), said(base, "no", logprob=-2.0)]
        cut = [
            user(question),
            choice(base.tokenizer.encode("red green blue and", add_special_tokens=False), logprob=-3.0),
        ]
        made.append(group((long, 1.0), (short, 0.0), (cut, 0.25)))
    return made


def train(
    learner: Learner,
    groups: list[TrajectoryGroup],
    *,
    seed: int = 0,
    rate: float = RATE,
    start: int = 0,
    reference: dict[str, bytes] | None = None,
    before: dict[str, bytes] | None = None,
    **options: Any,
) -> list[dict[str, float]]:
    """Run a job to its end, or from a step on; the metrics of its steps."""
    config = RLConfig(**options)
    made = rl.plan(groups, learner.base, config, seed=seed)
    return list(rl.steps(made, learner, config, rate, start=start, reference=reference, before=before))


def told(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics without the one that the clock writes."""
    return {name: value for name, value in metrics.items() if name != "tokens_per_second"}


def test_loss_and_gradients_of_a_job_are_those_of_an_unpacked_loop(
    base: Base, learner: Learner, files: dict[str, bytes], groups: list[TrajectoryGroup], tmp_path: Path
):
    config = RLConfig(kl_penalty_coef=0.2)
    found, _ = batches.of_groups(groups, base, config)
    slow, total, scored = twin(base, files, tmp_path), torch.zeros(()), []
    for history in found:
        new, _ = slow_logprobs(slow, history)
        with torch.no_grad(), slow.disable_adapter():
            scored.append((history, new, slow_logprobs(slow, history)[0]))
    tokens = sum(history.num_trained for history in found)
    divergence = float(sum((new.detach() - reference).sum() for _, new, reference in scored)) / tokens
    for history, new, reference in scored:
        old = [value for value, trains in zip(history.logprobs, history.trained, strict=True) if trains]
        for t in range(len(new)):
            k = float(new[t].detach() - reference[t])
            advantage = history.advantage + 0.2 * (divergence - k)
            ratio = min(math.exp(float(new[t].detach()) - old[t]), 5.0)
            total = total - history.weight * ratio * advantage * new[t] / tokens
    total.backward()
    wanted = slow_gradients(slow)

    (metrics,) = train(learner, groups, kl_penalty_coef=0.2, rate=0.0)

    norm = float(torch.stack([value.norm() for value in wanted.values()]).norm())
    assert metrics["loss"] == pytest.approx(total.item(), rel=1e-5)
    assert metrics["kl_policy_ref"] == pytest.approx(divergence, rel=1e-5, abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    scale = min(1.0, 0.1 / (norm + 1e-6))
    ours = {name: value / scale for name, value in learner.gradients().items()}
    assert_equal_gradients(
        ours, wanted, tolerance=5e-5
    )  # rounding alone puts fp32 2e-5 away from float64 here


def test_the_same_job_makes_the_same_bits(
    learner: Learner, files: dict[str, bytes], groups: list[TrajectoryGroup]
):
    made = []
    for _ in range(2):
        learner.load(files, with_optimizer=False)
        metrics = train(learner, groups, packed_sequence_length=70)
        made.append((learner.files(), [told(each) for each in metrics]))

    assert len(made[0][1]) > 2
    assert made[0] == made[1]


@pytest.mark.parametrize("options", [{}, {"precalculate_logprobs": True}, {"kl_penalty_coef": 0.1}], ids=str)
def test_a_job_goes_on_from_any_step_to_the_same_bits(
    learner: Learner, files: dict[str, bytes], groups: list[TrajectoryGroup], options: dict[str, Any]
):
    options = options | {"packed_sequence_length": 70}
    config = RLConfig(**options)
    made = rl.plan(groups, learner.base, config, seed=3)
    snapshots = []
    for _ in rl.steps(made, learner, config, RATE):
        snapshots.append(learner.files())

    for step in range(1, len(snapshots)):
        learner.reset()
        learner.load(snapshots[step - 1], with_optimizer=True)
        again = rl.plan(groups, learner.base, config, seed=3)
        list(rl.steps(again, learner, config, RATE, start=step, before=files))

        assert learner.files() == snapshots[-1]


def test_a_job_that_rescored_goes_on_only_from_where_it_started(
    learner: Learner, groups: list[TrajectoryGroup]
):
    with pytest.raises(TrainingError, match="the adapter that it started with"):
        train(learner, groups, precalculate_logprobs=True, start=1, packed_sequence_length=70)


def test_dropout_does_not_make_a_job_unrepeatable(base: Base, groups: list[TrajectoryGroup]):
    dropping = learner_for(base, LORA.model_copy(update={"dropout": 0.2}))
    made = []
    for seed in (1, 1, 2):
        dropping.reset()
        train(dropping, groups, seed=seed)
        made.append(dropping.files()[ADAPTER])

    assert made[0] == made[1] != made[2]


def test_the_order_of_rows_comes_from_the_jobs_seed(base: Base, groups: list[TrajectoryGroup]):
    config = RLConfig(packed_sequence_length=50)
    orders = {
        tuple(tuple(row.owners) for (row,) in rl.plan(groups, base, config, seed=seed).rows)
        for seed in range(6)
    }

    assert len(orders) > 1
    assert len({tuple(sorted(order)) for order in orders}) == 1


def test_what_was_rewarded_becomes_likelier(base: Base, learner: Learner):
    def answers() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        return [user("Yes or no?"), said(base, "yes")], [user("Yes or no?"), said(base, "no")]

    def likelihood(found: list[dict[str, Any]]) -> float:
        (history, _), _ = batches.of_groups([group((found, 1.0), (answers()[0], 0.0))], base, RLConfig())
        row = build_row([history], [0])
        with torch.no_grad(), learner.adapter.active():
            return float(rl.of_row(base.model, row, chunk=64)[0].sum())

    learner.reset()
    good, bad = answers()
    before = likelihood(good) - likelihood(bad)

    for _ in range(8):
        now = [answer for answer in answers()]
        for (_, told_choice), words in zip(now, (good, bad), strict=True):
            value = likelihood(words) / len(told_choice["token_ids"])
            for entry in told_choice["logprobs"]["content"]:
                entry["logprob"] = value
        train(learner, [group((now[0], 1.0), (now[1], 0.0))])

    assert likelihood(good) - likelihood(bad) > before + 1


EFFECTS: list[dict[str, Any]] = [
    {"ppo": True},
    {"loss_fn": "ppo", "epsilon": 0.01},
    {"epsilon": 0.01},
    {"epsilon": 0.5, "epsilon_high": 0.01},
    {"advantage_balance": 0.9},
    {"advantage_balance": -0.9},
    {"scale_rewards": False},
    {"importance_sampling_level": "sequence"},
    {"importance_sampling_level": "average"},
    {"importance_sampling_level": "geometric_average"},
    {"max_negative_advantage_importance_sampling_weight": 0.1},
    {"mask_prob_ratio": True, "epsilon": 0.5, "epsilon_high": 0.5},
    {"kimi_k2_tau": 1.0},
    {"kl_penalty_coef": 0.5},
    {"kl_penalty_coef": 0.5, "kl_penalty_source": "sample"},
    {"precalculate_logprobs": True},
    {"precalculate_logprobs": True, "truncated_importance_sampling": 0.5},
    {"truncated_importance_sampling": 0.5},
    {"allow_training_without_logprobs": True},
    {"packed_sequence_length": 70},
    {"num_trajectories_learning_rate_multiplier_power": 0.5},
]


@pytest.fixture(scope="module")
def uneven(base: Base, groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """Groups of which one has other rewards and one a plain answer, so that every option has something to change."""
    question = [user("Name a fruit.")]
    plain = [*question, {"role": "assistant", "content": "pear"}]
    return [
        *groups,
        group(([*question, said(base, "apple")], 3.0), ([*question, said(base, "stone")], 0.0), (plain, 1.0)),
    ]


@pytest.fixture(scope="module")
def usual(base: Base, files: dict[str, bytes], uneven: list[TrajectoryGroup]) -> bytes:
    """The adapter that those groups make with every option at its default."""
    found = learner_for(base, LORA)
    found.load(files, with_optimizer=False)
    train(found, uneven)
    return found.files()[ADAPTER]


@pytest.mark.parametrize("options", EFFECTS, ids=str)
def test_every_option_has_an_effect(
    learner: Learner, uneven: list[TrajectoryGroup], usual: bytes, options: dict[str, Any]
):
    metrics = train(learner, uneven, **options)

    assert learner.files()[ADAPTER] != usual
    assert all(
        type(value) in (int, float) and math.isfinite(value) for each in metrics for value in each.values()
    )


@pytest.mark.parametrize("options", [{"logprob_calculation_chunk_size": 3}, {"plot_tensors": True}], ids=str)
def test_options_about_the_machine_change_nothing_that_counts(
    learner: Learner, uneven: list[TrajectoryGroup], options: dict[str, Any]
):
    start = learner.files()
    (usual,) = train(learner, uneven)
    learner.load(start, with_optimizer=False)

    (metrics,) = train(learner, uneven, **options)

    for name in ("loss", "grad_norm", "entropy", "x/ratio_mean"):
        assert metrics[name] == pytest.approx(usual[name], rel=1e-5)


def test_an_option_without_effect_is_said_so(base: Base, groups: list[TrajectoryGroup]):
    made = rl.plan(groups, base, RLConfig(plot_tensors=True), seed=0)

    assert made.notes == ["plot_tensors is accepted and has no effect."]


def test_an_option_that_is_not_supported_is_refused(base: Base, groups: list[TrajectoryGroup]):
    with pytest.raises(TrainingError, match="scale_learning_rate_by_reward_std_dev is not supported"):
        rl.plan(groups, base, RLConfig(scale_learning_rate_by_reward_std_dev=True), seed=0)


def test_a_reference_adapter_takes_the_place_of_the_base_model(
    learner: Learner, files: dict[str, bytes], groups: list[TrajectoryGroup]
):
    (same,) = train(learner, groups, rate=0.0, kl_penalty_coef=0.1, reference=files)
    (base_model,) = train(learner, groups, rate=0.0, kl_penalty_coef=0.1)

    assert same["kl_policy_ref"] == pytest.approx(0, abs=1e-6)
    assert abs(base_model["kl_policy_ref"]) > 1e-3


def test_rescored_logprobs_make_the_first_step_on_policy(learner: Learner, groups: list[TrajectoryGroup]):
    (metrics,) = train(learner, groups, precalculate_logprobs=True)

    assert metrics["x/ratio_min"] == pytest.approx(1, abs=1e-4)
    assert metrics["x/ratio_max"] == pytest.approx(1, abs=1e-4)


def test_rescoring_is_done_with_the_weights_before_the_job(learner: Learner, groups: list[TrajectoryGroup]):
    metrics = train(learner, groups, precalculate_logprobs=True, packed_sequence_length=70, rate=3e-2)

    assert len(metrics) > 2
    assert metrics[0]["x/ratio_max"] == pytest.approx(1, abs=1e-4)
    assert abs(metrics[-1]["x/ratio_max"] - 1) > 0.01


def test_the_rate_grows_with_the_histories_of_a_row(learner: Learner, groups: list[TrajectoryGroup]):
    (metrics,) = train(learner, groups, num_trajectories_learning_rate_multiplier_power=0.5)

    assert metrics["learning_rate"] == pytest.approx(RATE * 3)


def test_a_loss_that_is_no_number_stops_before_the_optimizer(learner: Learner, base: Base):
    words = [user("a"), said(base, "yes", logprob=-5000.0)]
    start = learner.files()

    with pytest.raises(TrainingError, match="Lower the learning rate"):
        train(learner, [group((words, 0.0), ([user("a"), said(base, "no")], 1.0))], ppo=True)

    assert learner.files() == start


def test_one_row_is_one_step_and_its_tokens_are_counted(learner: Learner, groups: list[TrajectoryGroup]):
    made = rl.plan(groups, learner.base, RLConfig(packed_sequence_length=70), seed=0)

    metrics = list(rl.steps(made, learner, RLConfig(packed_sequence_length=70), RATE))

    assert len(metrics) == made.num_sequences == len(made.rows)
    assert sum(each["num_trainable_tokens"] for each in metrics) == made.num_trained_tokens
    assert made.num_trained_tokens == sum(row["trained_tokens"] for row in made.ledger)


def test_the_ledger_tells_the_ratio_of_each_trajectory(learner: Learner, groups: list[TrajectoryGroup]):
    config = RLConfig(packed_sequence_length=70)
    made = rl.plan(groups, learner.base, config, seed=0)
    assert {row["ratio"] for row in made.ledger} == {None}

    metrics = list(rl.steps(made, learner, config, 0.0))

    tokens = sum(row["ratio"] * row["trained_tokens"] for row in made.ledger)
    wanted = sum(each["x/ratio_mean"] * each["num_trainable_tokens"] for each in metrics)
    assert tokens == pytest.approx(wanted, rel=1e-5)


def test_a_ratio_that_overflows_is_clipped_and_told_as_a_number(learner: Learner, base: Base):
    words = [user("a"), said(base, "yes", logprob=-5000.0)]

    (metrics,) = train(learner, [group((words, 0.0), ([user("a"), said(base, "no")], 1.0))])

    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["x/ratio_max"] > 1e38
