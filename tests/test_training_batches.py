"""What each trajectory counts: advantages, weights, balance, and who is dropped."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from training_fixtures import base, choice, group, one_thread, said, user  # noqa: F401
from tuneyard.configs import RLConfig
from tuneyard.errors import TrainingError
from tuneyard.trajectories import TrajectoryGroup
from tuneyard_host.bases import Base
from tuneyard_host.training import batches, rl
from tuneyard_host.training.batches import advantages, normalise
from tuneyard_host.training.packing import History

PROMPT = [user("Answer yes, no or maybe.")]


def test_advantages_are_rewards_less_their_mean_over_their_population_deviation():
    rewards = [0.25, 1.0, 0.0, 0.5]

    scaled, centred = advantages(rewards, scale=True), advantages(rewards, scale=False)

    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    assert scaled == pytest.approx([(reward - mean) / (deviation + 1e-6) for reward in rewards])
    assert centred == pytest.approx([reward - mean for reward in rewards])


@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [1.0], [], [1e9, 1e9]])
def test_equal_rewards_teach_nothing_however_they_round(rewards: list[float]):
    assert advantages(rewards, scale=True) is None


@pytest.mark.parametrize("balance", [0.0, 0.4, -0.7, 1.0, -1.0])
def test_weights_and_advantages_have_the_mean_one_over_all_trained_tokens(balance: float):
    rng = random.Random(1)
    given = [
        History([0] * 30, [False] * (30 - count) + [True] * count, [], rng.uniform(-2, 2), 1 / count)
        for count in (3, 10, 29, 1)
    ]
    before = [history.advantage for history in given]

    normalise(given, balance=balance)

    tokens = [history for history in given for _ in range(history.num_trained)]
    assert statistics.fmean(token.weight for token in tokens) == pytest.approx(1)
    assert statistics.fmean(abs(token.advantage) * token.weight for token in tokens) == pytest.approx(1)
    up = next(h.advantage / b for h, b in zip(given, before, strict=True) if b > 0)
    down = next(h.advantage / b for h, b in zip(given, before, strict=True) if b < 0)
    assert down * (1 + min(balance, 0)) == pytest.approx(up * (1 - max(balance, 0)))


def test_nothing_divides_by_zero():
    alone = [History([0, 1], [False, True], [], advantage=-1.0, weight=1.0)]

    normalise(alone, balance=1.0)
    normalise([], balance=0.0)

    assert alone[0].advantage == 0.0


def test_every_trajectory_counts_the_same_however_long_it_is(base: Base):
    short, long = (
        [*PROMPT, said(base, "no")],
        [*PROMPT, said(base, "yes, and here is why I think so, at length")],
    )

    found, _ = batches.of_groups([group((short, 0.0), (long, 1.0))], base, RLConfig())

    shares = [history.weight * history.num_trained for history in found]
    assert shares[0] == pytest.approx(shares[1])


def test_additional_histories_train_with_their_trajectory(base: Base):
    extra = {"messages_and_choices": [*PROMPT, said(base, "maybe")], "tools": None}
    given = {
        "trajectories": [
            {
                "messages_and_choices": [*PROMPT, said(base, "yes")],
                "reward": 1,
                "additional_histories": [extra],
            },
            {"messages_and_choices": [*PROMPT, said(base, "no")], "reward": 0},
        ]
    }

    found, ledger = batches.of_groups([TrajectoryGroup.model_validate(given)], base, RLConfig())

    first, second, other = found
    assert first.advantage == second.advantage == -other.advantage
    assert (
        first.weight
        == second.weight
        == pytest.approx(other.weight * other.num_trained / ledger[0]["trained_tokens"])
    )
    assert [row["histories"] for row in ledger] == [2, 1]
    assert ledger[0]["trained_tokens"] == first.num_trained + second.num_trained


def test_what_cannot_train_is_dropped_with_its_reason(base: Base):
    answer = [*PROMPT, said(base, "yes")]
    plain = [*PROMPT, {"role": "assistant", "content": "no"}]
    long = [user("word " * 3000), said(base, "yes")]
    groups = [group((answer, 1.0), (answer, 1.0)), group((answer, 1.0), (plain, 0.0), (long, 0.5)), group()]

    made = rl.plan(groups, base, RLConfig(), seed=0)

    assert made.warnings == {batches.EQUAL_REWARDS: 2, batches.NO_TRAINED_TOKENS: 1, batches.TOO_LONG: 1}
    assert [row["dropped"] is None for row in made.ledger] == [False, False, True, False, False]
    assert made.num_sequences == 1
    assert any("1 of 3 groups have equal rewards" in note for note in made.notes)
    assert any("no finished trajectory" in note for note in made.notes)


def test_a_trajectory_that_is_dropped_still_counts_in_its_groups_mean(base: Base):
    answer, plain = [*PROMPT, said(base, "yes")], [*PROMPT, {"role": "assistant", "content": "no"}]

    _, ledger = batches.of_groups(
        [group((answer, 1.0), (answer, 0.9), (plain, 0.0))], base, RLConfig(scale_rewards=False)
    )

    assert ledger[0]["advantage"] / ledger[1]["advantage"] == pytest.approx((1 - 1.9 / 3) / (0.9 - 1.9 / 3))


def test_a_job_of_equal_rewards_has_no_steps_and_says_why(base: Base):
    answer = [*PROMPT, said(base, "yes")]

    made = rl.plan([group((answer, 0.1), (answer, 0.1), (answer, 0.1))] * 8, base, RLConfig(), seed=0)

    assert (made.num_sequences, made.num_trained_tokens) == (0, 0)
    assert made.warnings == {batches.EQUAL_REWARDS: 24}
    assert "All 8 groups have equal rewards: nothing to learn" in made.notes[0]


def test_a_conversation_longer_than_the_wanted_row_is_dropped_and_told(base: Base):
    short, long = [*PROMPT, said(base, "yes")], [user("word " * 80), said(base, "yes")]

    made = rl.plan([group((short, 1.0), (long, 0.0))], base, RLConfig(packed_sequence_length=40), seed=0)

    assert made.warnings == {batches.ROW_TOO_SHORT: 1}


def test_bad_data_names_the_trajectory_that_has_it(base: Base):
    alien = [*PROMPT, choice([5, 99_999])]

    with pytest.raises(TrainingError, match=r"Group 1, trajectory 0: .*outside the vocabulary"):
        rl.plan([group(), group((alien, 1.0), (alien, 0.0))], base, RLConfig(), seed=0)


def test_an_advantage_is_finite_for_tiny_differences():
    found = advantages([1.0, 1.0 + 1e-12], scale=True)

    assert found is not None and all(math.isfinite(value) for value in found)


def test_a_history_that_is_dropped_from_a_trajectory_is_told(base: Base):
    long = {"messages_and_choices": [user("word " * 3000), said(base, "yes")]}
    given = {
        "trajectories": [
            {
                "messages_and_choices": [*PROMPT, said(base, "yes")],
                "reward": 1,
                "additional_histories": [long],
            },
            {"messages_and_choices": [*PROMPT, said(base, "no")], "reward": 0},
        ]
    }

    made = rl.plan([TrajectoryGroup.model_validate(given)], base, RLConfig(), seed=0)

    assert made.warnings == {f"{batches.TOO_LONG} (part of a trajectory)": 1}
    assert made.ledger[0]["dropped_histories"] == {batches.TOO_LONG: 1}
    assert made.ledger[0]["dropped"] is None


def test_a_job_without_a_trainable_turn_says_what_to_send(base: Base):
    plain = [*PROMPT, {"role": "assistant", "content": "no"}]
    answer = [*PROMPT, said(base, "yes")]

    made = rl.plan(
        [group((plain, 0.0), (plain, 1.0)), group((answer, 1.0), (answer, 1.0))], base, RLConfig(), seed=0
    )

    assert made.num_sequences == 0
    assert "1 of 2 groups have equal rewards" in made.notes[0]
    assert "send choices with logprobs" in made.notes[1]
