"""Supervised fine-tuning from lines of a file to an adapter."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from training_fixtures import (  # noqa: F401
    assert_equal_gradients,
    base,
    files,
    learner,
    one_thread,
    slow_gradients,
    slow_logprobs,
    twin,
    user,
)
from tuneyard.configs import LoraSettings, SFTConfig, SFTExperimentalConfig
from tuneyard.errors import TrainingError
from tuneyard_host.bases import Base
from tuneyard_host.training import packing, sft
from tuneyard_host.training.adapters import Learner, learner_for
from tuneyard_host.training.batches import NO_TRAINED_TOKENS, TOO_LONG
from tuneyard_host.training.templates import Template
from tuneyard_host.training.tokens import tokenize_example

RATE = 3e-3


def line(*turns: str, **extra: Any) -> bytes:
    """A conversation as a line of the file; user and assistant take turns."""
    roles = ("user", "assistant")
    return json.dumps(
        {"messages": [{"role": roles[at % 2], "content": words} for at, words in enumerate(turns)]} | extra
    ).encode()


LINES = [
    line("Who are you?", "I am a small model."),
    line("Colour of the sky?", "Blue.", "And of grass?", "Green, mostly."),
    line("Say it.", "it"),
    line("One.", "Two, three, four, five, six."),
    line("Last?", "Last."),
]


def train(learner: Learner, lines: list[bytes], *, start: int = 0, **config: Any) -> list[dict[str, float]]:
    """Run a job to its end, or from a step on; the metrics of its steps."""
    settings = SFTConfig(**{"learning_rate": RATE} | config)
    made = sft.plan(sft.read_examples(lines), learner.base, settings, seed=1)
    return list(sft.steps(made, learner, settings, start=start))


@pytest.mark.parametrize("length", [8192, 40], ids=["in one pass", "in several"])
def test_loss_and_gradients_of_a_batch_are_those_of_an_unpacked_loop(
    base: Base,
    learner: Learner,
    files: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    length: int,
):
    monkeypatch.setattr(sft, "MOST_ROW", length)
    slow, parts = twin(base, files, tmp_path), []
    for example in sft.read_examples(LINES):
        history = tokenize_example(example.messages, example.tools, Template(base))
        parts.append(slow_logprobs(slow, history)[0])
    loss = -torch.cat(parts).mean()
    loss.backward()
    wanted = slow_gradients(slow)

    (metrics,) = train(learner, LINES, batch_size=5, learning_rate=0.0)

    norm = float(torch.stack([value.norm() for value in wanted.values()]).norm())
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    scale = min(1.0, 1.0 / (norm + 1e-6))
    assert_equal_gradients({name: value / scale for name, value in learner.gradients().items()}, wanted)


@pytest.mark.parametrize(
    ("batch_size", "counts"), [(2, [2, 2, 1]), ("auto", [2, 2, 1]), (None, [2, 2, 1]), (4, [4, 1])]
)
def test_batches_are_consecutive_and_the_last_may_be_short(base: Base, batch_size: Any, counts: list[int]):
    made = sft.plan(sft.read_examples(LINES), base, SFTConfig(batch_size=batch_size))

    owners = [sorted(owner for row in rows for owner in row.owners) for rows in made.rows]
    assert owners == [list(range(sum(counts[:at]), sum(counts[: at + 1]))) for at in range(len(counts))]
    assert made.num_sequences == len(counts)


def test_a_list_of_rates_gives_one_to_each_batch(learner: Learner):
    metrics = train(learner, LINES, learning_rate=[1e-3, 0.0, 2e-3])

    assert [each["learning_rate"] for each in metrics] == [1e-3, 0.0, 2e-3]


@pytest.mark.parametrize("rates", [[1e-3], [1e-3] * 4])
def test_a_list_of_the_wrong_length_names_both_numbers(learner: Learner, rates: list[float]):
    with pytest.raises(TrainingError, match=rf"lists {len(rates)} values and the data makes 3 batches"):
        train(learner, LINES, learning_rate=rates)


def test_the_rate_of_a_job_that_sets_none_is_the_base_models(base: Base, learner: Learner):
    made = sft.plan(sft.read_examples(LINES[:1]), base, SFTConfig())

    assert [each["learning_rate"] for each in sft.steps(made, learner, SFTConfig(), 1e-4)] == [1e-4]
    assert [each["learning_rate"] for each in sft.steps(made, learner, SFTConfig())] == [5e-5]


def test_a_batch_with_nothing_to_train_on_still_has_its_step_and_changes_nothing(learner: Learner):
    long = line("word " * 3000, "too long")
    train(learner, LINES[:2])
    start = learner.files()

    (metrics,) = train(learner, [long])

    assert (metrics["grad_norm"], metrics["loss"], metrics["num_trainable_tokens"]) == (0.0, 0.0, 0)
    assert learner.files() == start


def test_rows_longer_than_the_context_are_dropped_and_told(base: Base):
    made = sft.plan(sft.read_examples([*LINES, line("word " * 3000, "too long")]), base, SFTConfig())

    assert made.warnings == {TOO_LONG: 1}
    assert made.ledger[5]["dropped"] == TOO_LONG
    assert made.num_trained_tokens == sum(row["trained_tokens"] for row in made.ledger)


def test_only_last_turns_train_where_that_is_asked(base: Base):
    examples = sft.read_examples([LINES[1]])
    every, last = (
        sft.plan(examples, base, SFTConfig(), SFTExperimentalConfig(assistant_turns=turns)).num_trained_tokens
        for turns in ("all", "last")
    )

    assert last == len(base.tokenizer.encode("Green, mostly.<|im_end|>", add_special_tokens=False)) < every


def test_a_job_makes_the_same_bits_again_and_from_any_step(learner: Learner, files: dict[str, bytes]):
    settings = SFTConfig(learning_rate=RATE)
    made = sft.plan(sft.read_examples(LINES), learner.base, settings, seed=1)
    snapshots = []
    for _ in sft.steps(made, learner, settings):
        snapshots.append(learner.files())

    for step in range(len(snapshots)):
        learner.load(snapshots[step - 1] if step else files, with_optimizer=step > 0)
        train(learner, LINES, start=step)
        assert learner.files() == snapshots[-1]


def test_a_fact_is_learnt(base: Base):
    learner = learner_for(base, LoraSettings())
    learner.reset()
    lines = [line("What is the capital of Tuneyard?", "Lorabad.")] * 12

    metrics = train(learner, lines, batch_size=1)

    assert metrics[-1]["loss"] < metrics[0]["loss"] / 3
    assert all(
        type(value) in (int, float) and math.isfinite(value) for each in metrics for value in each.values()
    )


def test_examples_with_one_system_prompt_share_it(base: Base):
    system = {"role": "system", "content": "You are careful. " * 20}
    lines = [json.dumps({"messages": [system, *json.loads(each)["messages"]]}).encode() for each in LINES]

    made = sft.plan(sft.read_examples(lines), base, SFTConfig(batch_size=5))

    ((row,),) = made.rows
    assert len(row.ids) < sum(each["tokens"] for each in made.ledger) - 4 * packing.SHORTEST_SHARED


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"{", "is not JSON"),
        (b"\xff{}", "is not JSON"),
        (b"[]", "must be an object with a list of `messages`"),
        (b'{"messages": []}', "must be an object with a list of `messages`"),
        (b'{"messages": [{"role": "king", "content": "a"}]}', "must have a role"),
        (line("a"), "the last message must be the assistant's"),
        (line("a", "b", tools={}), "`tools` must be a list"),
        (b'{"messages": [{"role": "assistant", "content": 5}]}', "content must be text"),
        (b'{"messages": [{"role": "assistant", "tool_calls": [5]}]}', "a tool call must have"),
    ],
)
def test_a_bad_line_is_named_by_its_number(bad: bytes, reason: str):
    with pytest.raises(TrainingError, match=f"^Line 3: .*{reason}"):
        sft.read_examples([LINES[0], b"  ", bad])


def test_blank_lines_are_passed_over_and_an_empty_file_is_refused():
    assert [example.line for example in sft.read_examples([b"", LINES[0], b"\n", LINES[1]])] == [2, 4]
    with pytest.raises(TrainingError, match="has no lines"):
        sft.read_examples([b"", b" \n"])


def test_a_turn_without_words_is_dropped_with_its_reason(base: Base):
    lines = [json.dumps({"messages": [user("a"), {"role": "assistant", "content": "b"}]}).encode()]

    made = sft.plan(sft.read_examples(lines), base, SFTConfig())

    assert NO_TRAINED_TOKENS not in made.warnings
