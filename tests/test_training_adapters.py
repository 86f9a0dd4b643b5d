"""The adapter as files that peft reads, the optimizer as PyTorch's, and a learner that keeps nothing hidden."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load, save
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig, Qwen2Config

from training_fixtures import (  # noqa: F401
    LORA,
    base,
    files,
    histories,
    learner,
    one_thread,
    plain,
    quiet_peft,
    twin,
)
from tuneyard.configs import LoraSettings
from tuneyard.errors import TrainingError
from tuneyard_host.bases import Base
from tuneyard_host.training.adapters import Learner, dropout_of, learner_for, read_adapter
from tuneyard_host.training.logprobs import of_row
from tuneyard_host.training.packing import pack

RATE = 1e-3


def descend(
    learner: Learner, *, seed: int = 0, dropout: Any = None, clip: float = 0.1, weight_decay: float = 0.1
) -> float:
    """One step that makes some made-up answers likelier; the gradient's norm."""
    (row,) = pack(histories([(0, 9), (1, 12)], prompts=[30, 41], seed=seed), length=2048)
    learner.clear_gradient()
    with learner.adapter.active(dropout):
        logprobs, _ = of_row(learner.base.model, row, chunk=64)
    (-logprobs.mean()).backward()
    return learner.step(rate=RATE, weight_decay=weight_decay, clip=clip)


def test_peft_loads_our_files_and_computes_our_logits(base: Base, learner: Learner, tmp_path: Path):
    descend(learner)
    model = twin(base, learner.files(), tmp_path)
    ids = torch.tensor([[5, 6, 7, 8, 9]])

    with torch.no_grad():
        theirs = model(input_ids=ids).logits
        with learner.adapter.active():
            ours = base.model(input_ids=ids).logits

    assert float((ours - base.model(input_ids=ids).logits).abs().max()) > 0.1
    torch.testing.assert_close(ours, theirs.float(), rtol=1e-5, atol=1e-4)


def test_our_files_are_laid_out_as_pefts_own(learner: Learner, files: dict[str, bytes]):
    ours, theirs = (load(found["adapter_model.safetensors"]) for found in (learner.files(), files))
    config, wanted = (json.loads(found["adapter_config.json"]) for found in (learner.files(), files))

    assert {name: value.shape for name, value in ours.items()} == {
        name: value.shape for name, value in theirs.items()
    }
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert config.keys() <= wanted.keys()
    assert {
        name: wanted[name] for name in ("r", "lora_alpha", "lora_dropout", "bias", "peft_type", "task_type")
    } == {
        name: config[name] for name in ("r", "lora_alpha", "lora_dropout", "bias", "peft_type", "task_type")
    }
    assert sorted(config["target_modules"]) == sorted(wanted["target_modules"])


def test_a_fresh_adapter_changes_nothing_and_is_drawn_as_peft_draws_it(base: Base):
    found = learner_for(base, LoraSettings(rank=8, seed=5))
    found.reset()
    with quiet_peft():
        model = peft.get_peft_model(plain(base), peft.LoraConfig(r=8, target_modules=["q_proj", "down_proj"]))
    theirs = {name: value for name, value in model.named_parameters() if "lora_A" in name}

    ours = load(found.files()["adapter_model.safetensors"])

    for name, value in ours.items():
        if "lora_B" in name:
            assert not value.any()
        elif (twin := theirs.get(name.replace(".weight", ".default.weight"))) is not None:
            bound = 1 / math.sqrt(value.shape[1])
            assert float(value.abs().max()) <= bound
            assert float(value.std()) == pytest.approx(bound / 3**0.5, rel=0.1)
            assert float(twin.detach().std()) == pytest.approx(bound / 3**0.5, rel=0.1)


def test_the_seed_of_the_settings_is_the_adapter(base: Base):
    first, again, other = (
        learner_for(base, LoraSettings(rank=4, seed=seed, dropout=dropout))
        for seed, dropout in [(7, 0.0), (7, 0.1), (8, 0.0)]
    )
    for each in (first, again, other):
        each.reset()

    drawn = [each.files()["adapter_model.safetensors"] for each in (first, again, other)]

    assert drawn[0] == drawn[1] != drawn[2]


def test_a_learner_is_made_once_for_its_settings_and_several_share_a_base(base: Base, learner: Learner):
    other = learner_for(base, LoraSettings(rank=2, target_modules=("q_proj", "up_proj")))
    (row,) = pack(histories([(0, 9)], prompts=[30]), length=2048)

    def scored(each: Learner) -> torch.Tensor:
        with torch.no_grad(), each.adapter.active():
            return of_row(base.model, row, chunk=64)[0]

    before = scored(learner)
    descend(other)

    assert learner_for(base, LORA.model_copy()) is learner is not other
    assert torch.equal(scored(learner), before)
    assert not torch.equal(scored(other), before)


def test_the_steps_are_those_of_torchs_adamw(learner: Learner):
    state = load(learner.files()["adapter_model.safetensors"])
    names = list(state)
    parameters = [torch.nn.Parameter(state[name]) for name in names]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.99), weight_decay=0.1)

    for step in range(3):
        norm = descend(learner, seed=step, clip=0.5)
        for name, parameter in zip(names, parameters, strict=True):
            parameter.grad = learner.gradients()[name].clone()
        assert norm > 0.5
        assert float(torch.stack([p.grad.norm() for p in parameters]).norm()) == pytest.approx(0.5, rel=1e-4)
        optimizer.step()

    ours = load(learner.files()["adapter_model.safetensors"])
    for name, parameter in zip(names, parameters, strict=True):
        torch.testing.assert_close(ours[name], parameter.data, rtol=1e-5, atol=1e-7)


def test_a_small_gradient_is_not_scaled(learner: Learner):
    norm = descend(learner, clip=1e9)

    found = torch.cat([value.flatten() for value in learner.gradients().values()]).norm()

    assert float(found) == pytest.approx(norm, rel=1e-6)


def test_a_learner_goes_on_from_its_files_to_the_bit(base: Base, learner: Learner):
    other = learner_for(base, LORA.model_copy(update={"seed": 99}))
    descend(learner)
    other.load(learner.files(), with_optimizer=True)

    for each in (learner, other):
        descend(each, seed=1)
        descend(each, seed=2)

    ours, theirs = learner.files(), other.files()
    assert ours["adapter_model.safetensors"] == theirs["adapter_model.safetensors"]
    assert ours["optimizer.safetensors"] == theirs["optimizer.safetensors"]


def test_without_the_optimizer_a_load_forgets_its_moments(learner: Learner):
    descend(learner)
    saved = learner.files()

    learner.load(saved, with_optimizer=False)

    state = load(learner.files()["optimizer.safetensors"])
    assert not any(value.any() for value in state.values())
    assert learner.files()["adapter_model.safetensors"] == saved["adapter_model.safetensors"]


def test_dropout_comes_from_seed_and_step(learner: Learner):
    lora = LORA.model_copy(update={"dropout": 0.3})
    start = learner.files()
    made = []
    for step in (4, 4, 5, None):
        learner.load(start, with_optimizer=False)
        descend(learner, dropout=None if step is None else dropout_of(lora, 1, step))
        made.append(learner.files()["adapter_model.safetensors"])

    assert made[0] == made[1]
    assert len(set(made)) == 3
    assert dropout_of(LORA, 1, 0) is None


def test_dropout_keeps_the_mean_of_the_update(base: Base, learner: Learner):
    name, (a, b) = next(iter(learner.adapter.matrices.items()))
    layer = base.model.get_submodule(name)
    x = torch.ones(1, 4000, layer.in_features)

    with torch.no_grad():
        with learner.adapter.active():
            whole = layer(x).mean(1)
        with learner.adapter.active((0.5, 0)):
            dropped = layer(x)

    assert float(dropped.std(1).mean()) > 0.01
    torch.testing.assert_close(dropped.mean(1), whole, rtol=0.05, atol=0.05 * float(whole.abs().max()))
    assert a.shape == (LORA.rank, layer.in_features) and b.shape == (layer.out_features, LORA.rank)


def test_target_modules_that_the_base_does_not_have_are_named_with_those_it_has(base: Base):
    with pytest.raises(TrainingError, match=r"called c_attn; it has: down_proj, gate_proj, .*v_proj"):
        Learner(base, LoraSettings(target_modules=("q_proj", "c_attn")))


def test_the_vocabulary_projection_is_not_a_target(base: Base):
    with pytest.raises(TrainingError, match="called lm_head"):
        Learner(base, LoraSettings(target_modules=("lm_head",)))


def test_files_of_another_rank_are_refused_in_words(base: Base, files: dict[str, bytes]):
    with pytest.raises(TrainingError, match=r"does not fit the model's LoRA settings \(rank 2"):
        learner_for(base, LoraSettings(rank=2)).load(files, with_optimizer=False)


def test_a_gradient_that_is_no_number_stops_before_the_optimizer(learner: Learner):
    start = learner.files()
    next(iter(learner.gradients().values())).fill_(math.inf)

    with pytest.raises(TrainingError, match="Lower the learning rate"):
        learner.step(rate=RATE, weight_decay=0.1, clip=0.1)

    assert learner.files() == start


def test_a_reference_may_have_other_settings_than_the_learner(base: Base, files: dict[str, bytes]):
    tensors = load(files["adapter_model.safetensors"])
    config = json.loads(files["adapter_config.json"])
    half = {
        name: value[:2] if "lora_A" in name else value[:, :2].contiguous() for name, value in tensors.items()
    }
    other = {
        "adapter_model.safetensors": save({name: value for name, value in half.items() if "q_proj" in name}),
        "adapter_config.json": json.dumps(
            config | {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj"]}
        ).encode(),
    }

    found = read_adapter(base, other)

    assert found.scale == 3.0
    assert len(found.matrices) == 4
    with pytest.raises(TrainingError, match="reference adapter does not fit"):
        read_adapter(base, other | {"adapter_config.json": files["adapter_config.json"]})


def test_a_base_that_packs_differently_is_refused_in_words(base: Base):
    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, query_pre_attn_scalar=16, max_position_embeddings=64,
        final_logit_softcapping=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    capped = AutoModelForCausalLM.from_config(config).requires_grad_(False).eval()

    with pytest.raises(TrainingError, match="is a Gemma2ForCausalLM"):
        Learner(Base(base.spec, capped, base.tokenizer, 64, ""), LORA)


@pytest.mark.parametrize("family", [LlamaConfig, MistralConfig, Qwen2Config])
def test_other_families_train_too(base: Base, family: Any):
    config = family(
        vocab_size=2048, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).requires_grad_(False).eval()
    found = Learner(Base(base.spec, model, base.tokenizer, 64, ""), LORA)

    assert descend(found) > 0
