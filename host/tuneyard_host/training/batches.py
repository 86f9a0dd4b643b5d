"""From trajectory groups to what each token counts: advantages, weights, and who was left out and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tuneyard.configs import RLConfig
from tuneyard.errors import TrainingError
from tuneyard.trajectories import Trajectory, TrajectoryGroup
from tuneyard_host.bases import Base
from tuneyard_host.training.packing import History
from tuneyard_host.training.templates import Template
from tuneyard_host.training.tokens import tokenize

EQUAL_REWARDS = "all rewards of the group are equal"
NO_TRAINED_TOKENS = "no trainable tokens"
TOO_LONG = "longer than the context"
ROW_TOO_SHORT = "longer than packed_sequence_length"


def advantages(rewards: Sequence[float], *, scale: bool) -> list[float] | None:
    """A_i = r_i - mean, over the population standard deviation + 1e-6 when scaled; None when all rewards are equal."""
    if not rewards or max(rewards) == min(rewards):
        return None
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    deviation = math.sqrt(math.fsum(value * value for value in centred) / len(centred))
    return [value / (deviation + 1e-6) for value in centred] if scale else centred


def of_groups(
    groups: Sequence[TrajectoryGroup], base: Base, config: RLConfig
) -> tuple[list[History], list[dict[str, Any]]]:
    """The histories that train, with their advantage and weight; and a ledger row for each trajectory."""
    template = Template(base)
    ledger: list[dict[str, Any]] = []
    histories: list[History] = []
    for number, group in enumerate(groups):
        rewards = [trajectory.reward for trajectory in group.trajectories]
        shares = advantages(rewards, scale=config.scale_rewards)
        for index, trajectory in enumerate(group.trajectories):
            row: dict[str, Any] = {
                "group": number, "index": index, "reward": trajectory.reward, "advantage": 0.0, "weight": 0.0,
                "trained_tokens": 0, "histories": 0, "ratio": None, "dropped": None, "dropped_histories": {},
            }  # fmt: skip
            ledger.append(row)
            if shares is None:
                row["dropped"] = EQUAL_REWARDS
                continue
            try:
                made, dropped = _histories(trajectory, template, config)
            except TrainingError as error:
                raise TrainingError(f"Group {number}, trajectory {index}: {error}.") from error
            tokens = sum(history.num_trained for history in made)
            row |= {"advantage": shares[index], "trained_tokens": tokens, "histories": len(made)}
            row["dropped_histories"] = {reason: dropped.count(reason) for reason in dict.fromkeys(dropped)}
            row["dropped"] = dropped[0] if dropped and not made else None
            for history in made:
                history.advantage, history.weight, history.owner = shares[index], 1 / tokens, len(ledger) - 1
            histories += made
    normalise(histories, balance=config.advantage_balance)
    for history in histories:
        ledger[history.owner] |= {"advantage": history.advantage, "weight": history.weight}
    return histories, ledger


def normalise(histories: Sequence[History], *, balance: float) -> None:
    """Over all trained tokens M of the job: w <- w / mean_M(w), then A, balanced, <- A / mean_M(|A| w)."""
    tokens = sum(history.num_trained for history in histories)
    if not tokens:
        return
    mean_weight = math.fsum(history.weight * history.num_trained for history in histories) / tokens
    for history in histories:
        history.weight /= mean_weight
        if balance > 0 > history.advantage:
            history.advantage *= 1 - balance
        elif balance < 0 < history.advantage:
            history.advantage *= 1 + balance
    sizes = (abs(history.advantage) * history.weight * history.num_trained for history in histories)
    size = math.fsum(sizes) / tokens
    for history in histories:
        history.advantage = history.advantage / size if size else 0.0


def _histories(
    trajectory: Trajectory, template: Template, config: RLConfig
) -> tuple[list[History], list[str]]:
    """The histories of a trajectory that can train, and why each of the others cannot."""
    made, dropped = [], []
    for history in trajectory.histories:
        tokens = tokenize(history, template, without_logprobs=config.allow_training_without_logprobs)
        if tokens is None:
            dropped.append(NO_TRAINED_TOKENS)
        elif len(tokens.ids) > template.base.context_length:
            dropped.append(TOO_LONG)
        elif config.packed_sequence_length is not None and len(tokens.ids) > config.packed_sequence_length:
            dropped.append(ROW_TOO_SHORT)
        else:
            made.append(tokens)
    return made, dropped
