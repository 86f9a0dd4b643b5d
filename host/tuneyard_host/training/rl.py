"""Reinforcement learning: trajectory groups in, one gradient step for each packed row out.

Group-relative advantages, a clipped importance ratio (CISPO, or PPO), every trajectory counting the same;
docs/training.md has the formulas. It differs from the open reference in that conversations share every
beginning they have in common, that the row order comes from the job's own seed, and in the defects named in
that page.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from tuneyard.configs import UNSUPPORTED, RLConfig
from tuneyard.errors import TrainingError
from tuneyard.trajectories import TrajectoryGroup
from tuneyard_host.bases import Base
from tuneyard_host.training import batches, losses, plans, world
from tuneyard_host.training.adapters import Learner, device_of, dropout_of, read_adapter
from tuneyard_host.training.logprobs import of_row
from tuneyard_host.training.lora import Adapter
from tuneyard_host.training.packing import Row, pack, row_length
from tuneyard_host.training.parts import Part, Room, Scored
from tuneyard_host.training.plans import Plan

WEIGHT_DECAY, CLIP = 0.1, 0.1

__all__ = ["UNSUPPORTED", "Plan", "plan", "steps"]


def plan(groups: Sequence[TrajectoryGroup], base: Base, config: RLConfig, *, seed: int) -> Plan:
    """Tokenise, weigh and pack a job's groups: the same plan whenever it is made."""
    refuse_unsupported(config)
    histories, ledger = batches.of_groups(groups, base, config)
    length = config.packed_sequence_length or row_length(histories)
    rows = pack(histories, length=length)
    random.Random(seed).shuffle(rows)
    return Plan(
        num_sequences=len(rows),
        warnings=plans.count(ledger),
        num_trained_tokens=sum(row.num_trained for row in rows),
        ledger=ledger,
        notes=_notes(groups, ledger, config),
        rows=[[row] for row in rows],
        seed=seed,
    )


def steps(
    plan: Plan,
    learner: Learner,
    config: RLConfig,
    learning_rate: float,
    *,
    start: int = 0,
    reference: Mapping[str, bytes] | None = None,
    before: Mapping[str, bytes] | None = None,
) -> Iterator[dict[str, float]]:
    """Take the plan's gradient steps from number ``start`` on, and tell of each.

    ``reference`` is the adapter of the KL penalty, None for the base model itself. ``before`` is the
    adapter that the job started from: a job with precalculate_logprobs that goes on in the middle re-scores
    with it.
    """
    room = Room()
    chunk = config.logprob_calculation_chunk_size
    scored = _reference_scorer(learner, config, reference, room)
    rescored = _rescore(plan, learner, config, room, start=start, before=before)
    for number, (row,) in list(enumerate(plan.rows))[start:]:
        began = time.perf_counter()
        row = row.to(device_of(learner.base))
        terms = losses.Terms(
            advantage=row.advantages,
            weight=row.weights,
            old=rescored.get(number, row.logprobs),
            sampler=row.logprobs,
            history=row.history,
            num_histories=len(row.owners),
            reference=scored(row),
        )

        def gradient(
            parts: list[list[Part]], row: Row = row, number: int = number, terms: losses.Terms = terms
        ) -> Scored:
            """Add up the gradients of a row's parts; log p and entropy of all its tokens."""
            mean_divergence = None
            if terms.reference is not None and (len(parts[0]) > 1 or world.size() > 1):
                new = _scored(learner, learner.adapter, parts[0], chunk)
                mean_divergence = float(losses.divergences(new, terms, config).mean())
            learner.clear_gradient()
            found = Scored.of_size(row.num_trained, device_of(learner.base))
            for index, part in enumerate(parts[0]):
                with learner.adapter.active(dropout_of(learner.lora, plan.seed, number, index)):
                    new, entropy = of_row(learner.base.model, part.row, chunk=chunk)
                    its = terms.part(part.where, part.row.history, len(part.row.owners), mean_divergence)
                    losses.policy_loss(new, its, config)[0].backward()
                found.fill(part, new, entropy)
            return found.added_up()

        new, entropy = room.attempt([row], gradient)
        learner.add_up_gradients()
        loss, told = losses.policy_loss(new, terms, config)
        refuse_infinite(float(loss))
        rate = learning_rate * len(row.owners) ** config.num_trajectories_learning_rate_multiplier_power
        norm = learner.step(rate=rate, weight_decay=WEIGHT_DECAY, clip=CLIP)
        _note_ratios(plan, row, losses.ratio_sums(new, terms))
        yield {
            "loss": float(loss),
            "policy_loss": float(loss),
            "entropy": losses.mean(entropy * row.weights),
            "grad_norm": norm,
            "learning_rate": rate,
            "num_trainable_tokens": row.num_trained,
            "tokens_per_second": len(row.ids) / (time.perf_counter() - began),
            **told,
        }


def refuse_unsupported(config: RLConfig) -> None:
    """Fail on an option that this trainer does not have, for jobs that were queued before the door refused it."""
    for name, sentence in UNSUPPORTED.items():
        if getattr(config, name) != type(config).model_fields[name].default:
            raise TrainingError(sentence)


def refuse_infinite(loss: float) -> None:
    """Fail before the optimizer sees a loss that is not a number."""
    if not math.isfinite(loss):
        raise TrainingError(
            "The loss is not a finite number: training diverged, or the rollouts' logprobs are not this model's. "
            "Lower the learning rate, or start again from an earlier checkpoint."
        )


def _scored(learner: Learner, adapter: Adapter | None, parts: list[Part], chunk: int) -> Tensor:
    """log p (M,) of a row's tokens under an adapter, None for the base model, without a gradient."""
    found = Scored.of_size(len(parts[0].where), device_of(learner.base))
    for part in parts:
        with torch.no_grad(), adapter.active() if adapter else nullcontext():
            found.fill(part, *of_row(learner.base.model, part.row, chunk=chunk))
    return found.added_up().logprobs


def _reference_scorer(
    learner: Learner, config: RLConfig, reference: Mapping[str, bytes] | None, room: Room
) -> Callable[[Row], Tensor | None]:
    """What scores a row's tokens by the KL penalty's reference; without a penalty, nothing does."""
    if not config.kl_penalty_coef:
        return lambda _: None
    adapter = None if reference is None else read_adapter(learner.base, reference)
    chunk = config.logprob_calculation_chunk_size
    return lambda row: room.attempt([row], lambda parts: _scored(learner, adapter, parts[0], chunk))


def _note_ratios(plan: Plan, row: Row, sums: list[float]) -> None:
    """Add a row's ratios to the ledger, where each trajectory shows the mean over its trained tokens."""
    for owner, ratios in zip(row.owners, sums, strict=True):
        entry = plan.ledger[owner]
        entry["ratio"] = (entry["ratio"] or 0.0) + ratios / entry["trained_tokens"]


def _rescore(
    plan: Plan,
    learner: Learner,
    config: RLConfig,
    room: Room,
    *,
    start: int,
    before: Mapping[str, bytes] | None,
) -> dict[int, Tensor]:
    """With precalculate_logprobs, log p_old of each step's tokens under the weights that the job started from."""
    if not config.precalculate_logprobs:
        return {}
    if start and before is None:
        raise TrainingError(
            "A job with precalculate_logprobs can only go on from the adapter that it started with."
        )
    adapter = read_adapter(learner.base, before) if start and before is not None else learner.adapter
    chunk = config.logprob_calculation_chunk_size
    return {
        number: room.attempt(
            [row.to(device_of(learner.base))], lambda parts: _scored(learner, adapter, parts[0], chunk)
        )
        for number, (row,) in list(enumerate(plan.rows))[start:]
    }


def _notes(groups: Sequence[TrajectoryGroup], ledger: list[dict[str, Any]], config: RLConfig) -> list[str]:
    notes = []
    empty = sum(not group.trajectories for group in groups)
    equal = {row["group"] for row in ledger if row["dropped"] == batches.EQUAL_REWARDS}
    if empty:
        notes.append(f"{empty} of {len(groups)} groups have no finished trajectory.")
    if equal and len(equal) + empty == len(groups):
        notes.append(
            f"All {len(equal)} groups have equal rewards: nothing to learn. Rewards must differ within a group; sample "
            "more trajectories per group, or grade them more finely."
        )
    elif equal:
        notes.append(f"{len(equal)} of {len(groups)} groups have equal rewards and teach nothing.")
    if len(equal) + empty < len(groups) and not any(row["trained_tokens"] for row in ledger):
        notes.append(
            "No trajectory has a trainable turn: send choices with logprobs, or set allow_training_without_logprobs."
        )
    if config.plot_tensors:
        notes.append("plot_tensors is accepted and has no effect.")
    return notes
