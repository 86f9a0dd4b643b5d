"""The fast path against its slow twin: Hugging Face and peft, one conversation at a time, nothing shared or chunked."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from training_fixtures import (  # noqa: F401
    LORA,
    assert_equal_gradients,
    base,
    files,
    histories,
    learner,
    one_thread,
    plain,
    slow_gradients,
    slow_logprobs,
    twin,
)
from tuneyard.errors import TrainingError
from tuneyard_host.bases import Base
from tuneyard_host.training import attention, memory, norms, packing
from tuneyard_host.training.adapters import Learner, read_adapter
from tuneyard_host.training.attention import in_parts, in_runs
from tuneyard_host.training.logprobs import of_row
from tuneyard_host.training.packing import History, Row, build_row, pack

CHUNK = 16

ATOL = 5e-5
"""What fp32 leaves of logits of 30 and more, such as the base model has for tokens drawn at random."""


def computed(
    learner: Learner, row: Row, *, chunk: int = CHUNK, dropout: tuple[float, int] | None = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Log-probabilities and entropies of a row, and every LoRA gradient of their sum weighed by position."""
    learner.clear_gradient()
    with learner.adapter.active(dropout):
        logprobs, entropies = of_row(learner.base.model, row, chunk=chunk)
        (logprobs * torch.linspace(-1, 2, len(logprobs))).sum().backward()
    return logprobs.detach(), entropies, {name: value.clone() for name, value in learner.gradients().items()}


@pytest.mark.parametrize(
    ("sizes", "prompts"),
    [
        ([(0, 7), (1, 30), (2, 1)], [20, 3, 55]),
        ([(0, 9), (0, 14), (0, 2), (1, 12), (1, 3)], [70, 41]),
    ],
    ids=["apart", "in groups"],
)
def test_a_packed_row_is_what_each_conversation_computes_alone(
    base: Base,
    learner: Learner,
    files: dict[str, bytes],
    tmp_path: Path,
    sizes: list[tuple[int, int]],
    prompts: list[int],
):
    given = histories(sizes, prompts=prompts)
    (row,) = pack(given, length=2048)
    slow = twin(base, files, tmp_path)

    logprobs, entropies, gradients = computed(learner, row)

    weights = torch.linspace(-1, 2, len(logprobs))
    total = torch.zeros(())
    for number, owner in enumerate(row.owners):
        mine = row.history == number
        alone, entropy = slow_logprobs(slow, given[owner])
        total = total + (alone * weights[mine]).sum()
        torch.testing.assert_close(logprobs[mine], alone.detach().float(), rtol=1e-5, atol=ATOL)
        torch.testing.assert_close(entropies[mine], entropy.float(), rtol=1e-5, atol=ATOL)
    total.backward()
    assert_equal_gradients(gradients, slow_gradients(slow))


def test_a_shared_prompt_gives_what_a_repeated_one_gives(learner: Learner):
    given = sorted(
        histories([(0, 9), (0, 30), (0, 2), (0, 17)], prompts=[90]), key=lambda history: history.ids
    )
    shared, repeated = build_row(given, [0, 90, 90, 90]), build_row(given, [0, 0, 0, 0])

    once = computed(learner, shared)[0]
    again = computed(learner, repeated)[0]

    for number in range(4):
        torch.testing.assert_close(
            once[shared.history == number], again[repeated.history == number], rtol=1e-5, atol=ATOL
        )


def test_a_shared_prompt_gives_the_gradients_of_a_repeated_one(learner: Learner):
    given = sorted(histories([(0, 9), (0, 30), (0, 2)], prompts=[90]), key=lambda history: history.ids)
    found = []
    for row in (build_row(given, [0, 90, 90]), build_row(given, [0, 0, 0])):
        learner.clear_gradient()
        with learner.adapter.active():
            logprobs, _ = of_row(learner.base.model, row, chunk=CHUNK)
        sum(logprobs[row.history == number].mean() * (number - 1.5) for number in range(3)).backward()
        found.append({name: value.clone() for name, value in learner.gradients().items()})

    assert_equal_gradients(*found)


def test_branching_conversations_share_their_turns(
    base: Base, learner: Learner, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(packing, "SHORTEST_SHARED", 5)
    stem, *_ = histories([(0, 25)], prompts=[30])
    given = [
        History(
            stem.ids[:cut] + tail,
            stem.trained[:cut] + [True] * len(tail),
            [-1.0] * (cut + len(tail)),
            owner=owner,
        )
        for owner, (cut, tail) in enumerate(
            [(55, []), (55, [5, 6]), (42, [9] * 20), (42, [9] * 12 + [4]), (36, [8])]
        )
    ]
    (row,) = pack(given, length=2048)
    slow = twin(base, files, tmp_path)

    logprobs, _, gradients = computed(learner, row)

    assert len(row.forest.lengths) > 5
    weights = torch.linspace(-1, 2, len(logprobs))
    total = torch.zeros(())
    for number, owner in enumerate(row.owners):
        alone, _ = slow_logprobs(slow, given[owner])
        total = total + (alone * weights[row.history == number]).sum()
        torch.testing.assert_close(
            logprobs[row.history == number], alone.detach().float(), rtol=1e-5, atol=ATOL
        )
    total.backward()
    assert_equal_gradients(gradients, slow_gradients(slow))


@pytest.mark.parametrize("chunk", [1, 7, 10_000])
def test_the_chunk_size_changes_memory_and_nothing_else(learner: Learner, chunk: int):
    (row,) = pack(histories([(0, 9), (0, 14), (1, 12)], prompts=[30, 41]), length=2048)

    logprobs, entropies, gradients = computed(learner, row, chunk=chunk)
    whole = computed(learner, row, chunk=len(row.ids))

    torch.testing.assert_close(logprobs, whole[0], rtol=1e-5, atol=ATOL)
    torch.testing.assert_close(entropies, whole[1], rtol=1e-5, atol=ATOL)
    assert_equal_gradients(gradients, whole[2])


def test_a_conversation_does_not_feel_its_neighbours(learner: Learner):
    mine, other = histories([(0, 20), (1, 20)], prompts=[40, 45])
    other.ids[0] = 2047
    mine.ids[0] = 3
    swapped = History([2047, *reversed(other.ids[1:])], other.trained, other.logprobs, owner=1)

    first, second = (
        computed(learner, pack([mine, stranger], length=2048)[0])[0][:20] for stranger in (other, swapped)
    )

    assert float((first - second).abs().max()) < 1e-5


def test_with_no_adapter_active_the_base_is_what_it_was(base: Base, learner: Learner):
    given = histories([(0, 9), (1, 12)], prompts=[30, 41])
    (row,) = pack(given, length=2048)

    computed(learner, row)
    with torch.no_grad():
        logprobs, _ = of_row(base.model, row, chunk=CHUNK)
        alone = [slow_logprobs(base.model, given[owner])[0] for owner in row.owners]

    torch.testing.assert_close(logprobs, torch.cat(alone), rtol=1e-5, atol=ATOL)
    assert base.model.config._attn_implementation == "sdpa"


def test_an_adapter_read_from_its_files_computes_as_the_learner_does(
    base: Base, learner: Learner, files: dict[str, bytes]
):
    (row,) = pack(histories([(0, 9), (1, 12)], prompts=[30, 41]), length=2048)

    with torch.no_grad(), read_adapter(base, files).active():
        logprobs, _ = of_row(base.model, row, chunk=CHUNK)

    assert torch.equal(logprobs, computed(learner, row)[0])


@pytest.mark.parametrize("seed", range(4))
def test_attention_in_parts_is_attention_under_a_mask(seed: int):
    rng = random.Random(seed)
    stem = [rng.randrange(9) for _ in range(60)]
    given = sorted(
        [
            stem[: rng.randrange(60)] + [rng.randrange(9) for _ in range(rng.randrange(1, 40))]
            for _ in range(9)
        ]
    )
    row = build_row(
        [History(ids, [True] * len(ids), [0.0] * len(ids)) for ids in given], packing.shared_beginnings(given)
    )
    torch.manual_seed(seed)
    inputs = [torch.randn(2, 3, len(row.ids), 16, requires_grad=True) for _ in range(3)]
    weights = torch.randn(2, 3, len(row.ids), 16)

    found = []
    for attend in (in_parts, in_runs):
        seen = attend(*inputs, row.forest, 0.3)
        found.append([seen.detach(), *torch.autograd.grad((seen * weights).sum(), inputs)])

    assert len(row.forest.parts) > len(row.forest.lengths)
    for fast, slow in zip(*found, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-5, atol=2e-5)


def test_a_sliding_window_is_refused_where_it_would_matter(
    base: Base, learner: Learner, monkeypatch: pytest.MonkeyPatch
):
    (row,) = pack(histories([(0, 9)], prompts=[30]), length=2048)
    monkeypatch.setattr(base.model.model.layers[0].self_attn, "sliding_window", 38)

    with pytest.raises(TrainingError, match="sliding window of 38 tokens, and a conversation has 39"):
        computed(learner, row)


def test_the_fast_norm_has_the_gradient_of_its_formula():
    x = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, dtype=torch.float64)

    assert torch.autograd.gradcheck(lambda value: norms._normalise(value, weight, 1e-3), (x,))


def test_the_fast_norm_takes_only_places_it_fills():
    class ShiftedRMSNorm(torch.nn.Module):
        """Gemma's: the weight is added to one."""

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(8) / 2), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return (
                x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * (1 + self.weight)
            )

    model = torch.nn.Sequential(ShiftedRMSNorm(), Qwen3RMSNorm(8))

    norms.quicken(model)

    assert [type(module) for module in model] == [ShiftedRMSNorm, norms.FrozenRMSNorm]


def test_layers_that_are_computed_twice_give_the_same_bits(learner: Learner, monkeypatch: pytest.MonkeyPatch):
    (row,) = pack(histories([(0, 9), (0, 14), (1, 12)], prompts=[30, 41]), length=2048)
    usual = computed(learner, row)
    passes = []
    monkeypatch.setattr(memory, "SHARE", 0.0)
    layer = learner.base.model.model.layers[0].self_attn.q_proj
    hook = layer.register_forward_hook(lambda *_: passes.append(1))

    again = computed(learner, row)
    hook.remove()

    assert len(passes) == 2
    assert torch.equal(usual[0], again[0])
    assert all(torch.equal(usual[2][name], again[2][name]) for name in usual[2])


def test_dropout_drops_the_same_when_a_layer_is_computed_twice(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
):
    (row,) = pack(histories([(0, 9), (1, 12)], prompts=[30, 41]), length=2048)
    found = []
    for share in (1.0, 0.0):
        monkeypatch.setattr(memory, "SHARE", share)
        found.append(computed(learner, row, dropout=(0.3, 5))[2])

    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("attend", [in_parts, in_runs])
def test_a_base_in_bfloat16_trains_in_about_the_same_direction(
    base: Base, learner: Learner, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, attend: Any
):
    (row,) = pack(histories([(0, 9), (0, 14), (1, 12)], prompts=[30, 41]), length=2048)
    wanted = computed(learner, row)
    half = Learner(
        Base(base.spec, plain(base).to(torch.bfloat16).requires_grad_(False), base.tokenizer, 2048, ""), LORA
    )
    half.load(files, with_optimizer=False)
    monkeypatch.setattr(attention, "in_parts", attend)

    found = computed(half, row)

    torch.testing.assert_close(found[0], wanted[0], rtol=0.05, atol=0.3)
    ours, theirs = (torch.cat([value.flatten() for value in each[2].values()]) for each in (found, wanted))
    assert float(torch.nn.functional.cosine_similarity(ours, theirs, dim=0)) > 0.98
