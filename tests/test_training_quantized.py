"""QLoRA: an adapter on a base model whose weights are kept in four bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from training_fixtures import (  # noqa: F401  fixtures
    LORA,
    assert_equal_gradients,
    base,
    files,
    histories,
    one_thread,
    quiet_peft,
    slow_gradients,
    slow_logprobs,
)
from tuneyard.settings import BaseModelSpec
from tuneyard_host import bases
from tuneyard_host.bases import Base
from tuneyard_host.training import losses
from tuneyard_host.training.adapters import learner_for
from tuneyard_host.training.logprobs import of_row
from tuneyard_host.training.packing import pack

SPEC = BaseModelSpec(id="tuneyard/tiny-nf4", source="builtin:tiny", quantization="nf4")
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)


@pytest.fixture(scope="module")
def quantized() -> Base:
    return bases.load(SPEC)


def test_four_bits_take_less_memory_and_compute_about_the_same(base: Base, quantized: Base):
    kept = [
        sum(p.numel() * p.element_size() for p in model.model.layers.parameters())
        for model in (quantized.model, base.model)
    ]
    ids = base.tokenizer("Answer yes, no or maybe.", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        near, right = (model(ids).logits.log_softmax(-1) for model in (quantized.model, base.model))

    assert kept[0] < kept[1] / 6
    difference = float((near.exp() * (near - right)).sum(-1).mean())
    assert 0 < difference < 0.5


def test_loss_and_gradients_are_those_of_peft_on_the_same_four_bits(
    quantized: Base,
    files: dict[str, bytes],
    tmp_path: Path,
):
    made = histories([(0, 6), (0, 8), (1, 5)], prompts=[12, 9], seed=2)
    slow = _twin(files, tmp_path)
    wanted_logprobs = [slow_logprobs(slow, history)[0] for history in made]
    loss = -torch.cat(wanted_logprobs).mean()
    loss.backward()
    wanted = slow_gradients(slow)

    learner = learner_for(quantized, LORA)
    learner.load(files, with_optimizer=False)
    learner.clear_gradient()
    (row,) = pack(made, length=1000)
    with learner.adapter.active():
        new, _ = of_row(quantized.model, row, chunk=8)
        ours = losses.cross_entropy(new, count=row.num_trained)
        ours.backward()

    assert float(ours) == pytest.approx(float(loss), rel=1e-5)
    assert_equal_gradients(learner.gradients(), wanted, tolerance=1e-4)


def _twin(files: dict[str, bytes], folder: Path) -> Any:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    fresh = bases.load.__wrapped__(SPEC)
    with quiet_peft():
        return peft.PeftModel.from_pretrained(fresh.model, folder, is_trainable=True).eval()


def test_what_is_served_is_what_was_trained_on():
    ids = torch.tensor([[5, 9, 12, 40, 7, 300]])
    with torch.no_grad():
        trained = bases.load.__wrapped__(SPEC).model(ids).logits.log_softmax(-1)
        served = bases.load_to_serve(SPEC.model_copy(update={"id": "tuneyard/served"}))
        assert float((served.model(ids).logits.log_softmax(-1) - trained).abs().max()) < 1e-4
    assert {type(layer.mlp.up_proj) for layer in served.model.model.layers} == {torch.nn.Linear}
