"""Supervised fine-tuning: conversations in, one gradient step for each batch of consecutive ones out.

The loss is the mean of -log p over a batch's trained tokens: the assistant's turns with their ends.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tuneyard.configs import SFTConfig, SFTExperimentalConfig
from tuneyard.errors import TrainingError
from tuneyard_host.bases import Base
from tuneyard_host.training import losses, plans
from tuneyard_host.training.adapters import Learner, device_of, dropout_of
from tuneyard_host.training.batches import NO_TRAINED_TOKENS, TOO_LONG
from tuneyard_host.training.logprobs import of_row
from tuneyard_host.training.packing import MOST_ROW, History, Row, pack
from tuneyard_host.training.parts import Part, Room, Scored
from tuneyard_host.training.plans import Plan
from tuneyard_host.training.rl import refuse_infinite
from tuneyard_host.training.templates import Message, Template, template_message, template_tools
from tuneyard_host.training.tokens import tokenize_example

LEARNING_RATE, WEIGHT_DECAY, CLIP, CHUNK = 5e-5, 0.0, 1.0, 1024
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass
class Example:
    """One conversation to learn, and the line it stands on, counted from 1."""

    line: int
    messages: list[Message]
    tools: list[dict[str, Any]] | None


def read_examples(lines: Iterable[bytes]) -> list[Example]:
    """The conversations of a JSONL file; blank lines are passed over, a bad one fails the job by its number."""
    examples = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                examples.append(_example(number, line))
            except (TrainingError, ValueError) as error:
                raise TrainingError(f"Line {number}: {error}.") from error
    if not examples:
        raise TrainingError("The training data has no lines: put one JSON object with `messages` on each.")
    return examples


def plan(
    examples: Sequence[Example],
    base: Base,
    config: SFTConfig,
    experimental: SFTExperimentalConfig | None = None,
    *,
    seed: int = 0,
) -> Plan:
    """Tokenise and batch a file's conversations, in file order."""
    template = Template(base)
    last_only = experimental is not None and experimental.assistant_turns == "last"
    size = config.examples_per_batch
    slices = [examples[start : start + size] for start in range(0, len(examples), size)]
    _refuse_wrong_rates(config, len(slices))
    ledger: list[dict[str, Any]] = []
    batches = [
        [made for example in part if (made := _history(example, template, ledger, last_only))]
        for part in slices
    ]
    rows = [pack(batch, length=MOST_ROW) for batch in batches]
    empty = sum(not batch for batch in batches)
    return Plan(
        num_sequences=len(slices),
        warnings=plans.count(ledger),
        num_trained_tokens=sum(row["trained_tokens"] for row in ledger),
        ledger=ledger,
        notes=[f"{empty} of {len(slices)} batches have nothing to train on."] if empty else [],
        rows=rows,
        seed=seed,
    )


def steps(
    plan: Plan, learner: Learner, config: SFTConfig, learning_rate: float | None = None, *, start: int = 0
) -> Iterator[dict[str, float]]:
    """Take one gradient step for each batch from number ``start`` on; an empty batch changes nothing.

    ``learning_rate`` is the base model's own, for a job that sets none.
    """
    room = Room()
    for number, rows in list(enumerate(plan.rows))[start:]:
        began = time.perf_counter()
        rate = _rate(config, number, default=LEARNING_RATE if learning_rate is None else learning_rate)
        rows = [row.to(device_of(learner.base)) for row in rows]
        trained = sum(row.num_trained for row in rows)

        def gradient(
            parts: list[list[Part]], rows: list[Row] = rows, number: int = number, trained: int = trained
        ) -> list[Scored]:
            """Add up the gradients of a batch's rows; log p and entropy of all their tokens."""
            learner.clear_gradient()
            found = [Scored.of_size(row.num_trained, device_of(learner.base)) for row in rows]
            for index, (its, scored) in enumerate(zip(parts, found, strict=True)):
                for place, part in enumerate(its):
                    with learner.adapter.active(dropout_of(learner.lora, plan.seed, number, index, place)):
                        new, entropy = of_row(learner.base.model, part.row, chunk=CHUNK)
                        losses.cross_entropy(new, count=trained).backward()
                    scored.fill(part, new, entropy)
            return [scored.added_up() for scored in found]

        scored = room.attempt(rows, gradient)
        learner.add_up_gradients()
        loss = sum(float(losses.cross_entropy(each.logprobs, count=trained)) for each in scored)
        refuse_infinite(loss)
        computed = sum(len(row.ids) for row in rows)
        yield {
            "loss": loss,
            "entropy": sum(float(each.entropies.sum()) for each in scored) / max(1, trained),
            "grad_norm": learner.step(rate=rate, weight_decay=WEIGHT_DECAY, clip=CLIP) if trained else 0.0,
            "learning_rate": rate,
            "num_trainable_tokens": trained,
            "tokens_per_second": computed / (time.perf_counter() - began),
        }


def _history(
    example: Example, template: Template, ledger: list[dict[str, Any]], last_only: bool
) -> History | None:
    """An example's tokens and its ledger row; None where there is nothing to train on."""
    try:
        made = tokenize_example(example.messages, example.tools, template, last_only=last_only)
    except TrainingError as error:
        raise TrainingError(f"Line {example.line}: {error}.") from error
    dropped = TOO_LONG if len(made.ids) > template.base.context_length else None
    dropped = dropped or (None if made.num_trained else NO_TRAINED_TOKENS)
    tokens = 0 if dropped else made.num_trained
    ledger.append(
        {"line": example.line, "trained_tokens": tokens, "tokens": len(made.ids), "dropped": dropped}
    )
    made.owner = len(ledger) - 1
    return None if dropped else made


def _rate(config: SFTConfig, number: int, *, default: float) -> float:
    rate = config.learning_rate
    return rate[number] if isinstance(rate, list) else default if rate is None else rate


def _refuse_wrong_rates(config: SFTConfig, num_batches: int) -> None:
    rates = config.learning_rate
    if isinstance(rates, list) and len(rates) != num_batches:
        raise TrainingError(
            f"learning_rate lists {len(rates)} values and the data makes {num_batches} batches of "
            f"{config.examples_per_batch}: give one value, or one for each batch."
        )


def _example(number: int, line: bytes) -> Example:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise TrainingError(f"is not JSON ({error})") from error
    if not isinstance(data, dict) or not isinstance(data.get("messages"), list) or not data["messages"]:
        raise TrainingError("must be an object with a list of `messages`")
    for message in data["messages"]:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise TrainingError(f"each message must have a role, one of {', '.join(ROLES)}")
    if data["messages"][-1]["role"] != "assistant":
        raise TrainingError("the last message must be the assistant's")
    tools = data.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise TrainingError("`tools` must be a list of objects")
    return Example(number, [template_message(message) for message in data["messages"]], template_tools(tools))
