"""The live adapter on a loaded base model, its optimizer, and both as files.

All of an adapter's matrices are views of one flat fp32 vector, as are their gradients and the optimizer's
moments: a step is a handful of vector operations, and swapping one adapter for another is a copy.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors.torch import load as read_tensors
from safetensors.torch import save as write_tensors
from torch import Tensor, nn

from tuneyard.configs import LoraSettings
from tuneyard.errors import TrainingError
from tuneyard_host.bases import Base
from tuneyard_host.training import world
from tuneyard_host.training.logprobs import refuse_unknown
from tuneyard_host.training.lora import Adapter, attach, fresh
from tuneyard_host.training.norms import quicken

ADAPTER, CONFIG, OPTIMIZER = "adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors"
BETAS, EPSILON = (0.9, 0.99), 1e-8


class Learner:
    """The adapter that a job trains, attached to its base model, plus its AdamW."""

    def __init__(self, base: Base, lora: LoraSettings) -> None:
        self.base = base
        self.lora = lora
        self._layers = attach(base.model, lora.target_modules)
        refuse_unknown(base)
        quicken(base.model)
        initial = fresh(self._layers, lora)
        self._shapes = {name: (a.shape, b.shape) for name, (a, b) in initial.items()}
        size = sum(a.numel() + b.numel() for a, b in initial.values())
        flat = [torch.zeros(size, device=device_of(base)) for _ in range(4)]
        self._weights, self._gradient, self._first, self._second = flat
        self._taken = 0
        parameters = [nn.Parameter(view) for _, view in self._views(self._weights)]
        for parameter, (_, gradient) in zip(parameters, self._views(self._gradient), strict=True):
            parameter.grad = gradient
        pairs = zip(parameters[::2], parameters[1::2], strict=True)
        self.adapter = Adapter(
            self._layers, dict(zip(self._shapes, pairs, strict=True)), lora.alpha / lora.rank
        )
        self.reset()

    def reset(self) -> None:
        """A fresh adapter from the settings' seed, and an optimizer that has seen nothing."""
        values = [matrix for pair in fresh(self._layers, self.lora).values() for matrix in pair]
        for (_, view), value in zip(self._views(self._weights), values, strict=True):
            view.copy_(value)
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Forget the moments: for the first job of a kind."""
        self._first.zero_()
        self._second.zero_()
        self._taken = 0

    def load(self, files: Mapping[str, bytes], *, with_optimizer: bool) -> None:
        """Become the adapter in ``files``; without the optimizer's state, that starts empty."""
        self._fill(self._weights, read_tensors(files[ADAPTER]))
        self.reset_optimizer()
        if with_optimizer and OPTIMIZER in files:
            state = read_tensors(files[OPTIMIZER])
            self._fill(self._first, state, prefix="first.")
            self._fill(self._second, state, prefix="second.")
            self._taken = int(state["taken"])

    def files(self) -> dict[str, bytes]:
        """The adapter in the standard PEFT layout, and the optimizer's state; the same learner gives the same bytes."""
        moments = self._named(self._first, prefix="first.") | self._named(self._second, prefix="second.")
        return {
            ADAPTER: write_tensors(self._named(self._weights), {"format": "pt"}),
            CONFIG: (json.dumps(self._config(), indent=2, sort_keys=True) + "\n").encode(),
            OPTIMIZER: write_tensors(moments | {"taken": torch.tensor(self._taken)}, {"format": "pt"}),
        }

    def clear_gradient(self) -> None:
        """Forget the gradient: before the first ``backward`` of a step."""
        self._gradient.zero_()

    def add_up_gradients(self) -> None:
        """Make the gradient the sum of those of all processes: after the last ``backward`` of a step."""
        world.add_up(self._gradient)

    def step(self, *, rate: float, weight_decay: float, clip: float) -> float:
        """One AdamW step along the gradient, scaled down to the norm ``clip``; returns its norm before that."""
        norm = float(self._gradient.norm())
        if not math.isfinite(norm):
            raise TrainingError(
                "The gradient is not a finite number: training diverged. Lower the learning rate, or start again "
                "from an earlier checkpoint."
            )
        self._gradient.mul_(min(1.0, clip / (norm + 1e-6)))
        self._taken += 1
        self._weights.mul_(1 - rate * weight_decay)
        self._first.lerp_(self._gradient, 1 - BETAS[0])
        self._second.mul_(BETAS[1]).addcmul_(self._gradient, self._gradient, value=1 - BETAS[1])
        scale = self._second.sqrt().div_(math.sqrt(1 - BETAS[1] ** self._taken)).add_(EPSILON)
        self._weights.addcdiv_(self._first, scale, value=-rate / (1 - BETAS[0] ** self._taken))
        return norm

    def gradients(self) -> dict[str, Tensor]:
        """The gradient of each matrix under its name in the PEFT layout."""
        return dict(self._views(self._gradient))

    def _views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each matrix of a flat vector under its PEFT name: A then B, layer by layer."""
        start = 0
        for name, shapes in self._shapes.items():
            for part, shape in zip("AB", shapes, strict=True):
                yield f"{_PREFIX}{name}.lora_{part}.weight", flat[start : start + shape.numel()].view(shape)
                start += shape.numel()

    def _fill(self, flat: Tensor, tensors: Mapping[str, Tensor], *, prefix: str = "") -> None:
        """Copy named matrices into a flat vector; all of them must be there, in the right shape."""
        for name, view in self._views(flat):
            value = tensors.get(prefix + name)
            if value is None or value.shape != view.shape:
                why = "missing" if value is None else "of another shape"
                raise TrainingError(
                    f"The checkpoint does not fit the model's LoRA settings (rank {self.lora.rank} on "
                    f"{', '.join(self.lora.target_modules)}): {name} is {why}."
                )
            view.copy_(value)

    def _named(self, flat: Tensor, *, prefix: str = "") -> dict[str, Tensor]:
        return {prefix + name: view.cpu().contiguous() for name, view in self._views(flat)}

    def _config(self) -> dict[str, Any]:
        """What ``peft.LoraConfig`` writes for these settings; what it leaves out here is its default."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base.spec.id,
            "inference_mode": True,
            "r": self.lora.rank,
            "lora_alpha": self.lora.alpha,
            "lora_dropout": self.lora.dropout,
            "target_modules": sorted(self.lora.target_modules),
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "modules_to_save": None,
            "use_dora": False,
            "use_rslora": False,
        }


_PREFIX = "base_model.model."
_MOST_LEARNERS = 8
_learners: dict[tuple[int, str], Learner] = {}


def learner_for(base: Base, lora: LoraSettings) -> Learner:
    """The learner of these settings on this base, kept while it is in use: it holds what the last job left in it."""
    key = (id(base.model), lora.model_dump_json())
    found = _learners.pop(key, None) or Learner(base, lora)
    _learners[key] = found
    while len(_learners) > _MOST_LEARNERS:
        del _learners[next(iter(_learners))]
    return found


def read_adapter(base: Base, files: Mapping[str, bytes]) -> Adapter:
    """An adapter from its files, of whatever rank and targets, to compute with and not to train."""
    config = json.loads(files[CONFIG])
    tensors = read_tensors(files[ADAPTER])
    device = device_of(base)
    layers = attach(base.model, tuple(config["target_modules"]))
    try:
        matrices = {
            name: (
                tensors[f"{_PREFIX}{name}.lora_A.weight"].to(device),
                tensors[f"{_PREFIX}{name}.lora_B.weight"].to(device),
            )
            for name in layers
        }
    except KeyError as error:
        raise TrainingError(
            f"The reference adapter does not fit the base model: {error.args[0]} is missing."
        ) from error
    return Adapter(layers, matrices, config["lora_alpha"] / config["r"])


def device_of(base: Base) -> torch.device:
    """Where the base model computes."""
    return torch.device(base.model.get_input_embeddings().weight.device)


def dropout_of(lora: LoraSettings, *key: int) -> tuple[float, int] | None:
    """The dropout of one forward pass, drawn from the job's seed and the numbers of the step and the row."""
    if not lora.dropout:
        return None
    return lora.dropout, int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7])
