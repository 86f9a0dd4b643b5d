"""Low-rank updates on a frozen model, y = x W^T + b + s (x A^T) B^T, that can be switched on and off.

The linear layers of a loaded base are taught once to look for an adapter; with none active they compute
what they always did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from tuneyard.configs import LoraSettings
from tuneyard.errors import TrainingError


class Adapted(nn.Module):
    """What a frozen linear layer becomes that adds the active adapter's update to its own output, when there is one."""

    in_features: int
    out_features: int
    update: tuple[Tensor, Tensor, float] | None = None
    """A (rank, in), B (out, rank) and their scale s."""
    dropout: tuple[float, int] | None = None
    """Its rate, and the seed that this layer draws from."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        own: Tensor = super().forward(input)  # the frozen layer's own class stands behind this one
        if self.update is None:
            return own
        return own + _low_rank(self._dropped(input), None, None, *self.update)

    def _dropped(self, input: Tensor) -> Tensor:
        if self.dropout is None:
            return input
        rate, seed = self.dropout
        drawn = torch.rand(input.shape, generator=torch.Generator().manual_seed(seed))
        keep = drawn.to(input.device) >= rate
        return input * keep.to(input.dtype) / (1 - rate)


class AdaptedLinear(Adapted, nn.Linear):
    """The same in one operation, where the weights are plain and nothing is dropped."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        if self.update is None or self.dropout is not None:
            return super().forward(input)
        return _low_rank(input, self.weight, self.bias, *self.update)


def adapted(kind: type[nn.Linear]) -> type[Adapted]:
    """The class that a layer of this kind becomes: plain, or in four bits by bitsandbytes. TrainingError for others."""
    if kind is nn.Linear:
        return AdaptedLinear
    if issubclass(kind, Adapted):
        return kind
    if kind.__name__ == "Linear4bit":
        return _made.setdefault(kind, type(f"Adapted{kind.__name__}", (Adapted, kind), {}))
    raise TrainingError(
        f"Layers of the kind {kind.__name__} cannot be adapted; use an unquantised base model, or nf4."
    )


_made: dict[type, type[Adapted]] = {}


class _LowRank(torch.autograd.Function):
    """x W^T + bias + s (x A^T) B^T, or its last term alone: one node in the graph, and only x and x A^T are kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        low = (flat @ a.to(x.dtype).T).mul_(scale)
        up = b.to(x.dtype).T
        y = low @ up if weight is None else F.linear(flat, weight, bias).addmm_(low, up)
        ctx.save_for_backward(flat, low, a, b, *([] if weight is None else [weight]))
        ctx.scale = scale
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low, a, b, *weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        through = (flat @ b.to(flat.dtype)).mul_(ctx.scale)
        to_x = None
        if ctx.needs_input_grad[0]:
            down = a.to(flat.dtype)
            to_x = (flat @ weight[0]).addmm_(through, down) if weight else through @ down
            to_x = to_x.view(*grad.shape[:-1], x.shape[-1])
        return to_x, None, None, (through.T @ x).to(a.dtype), (low.T @ flat).T.to(b.dtype), None


_low_rank: Callable[..., Tensor] = _LowRank.apply


@dataclass
class Adapter:
    """The matrices of one adapter by the name of the layer they update, and their common scale alpha / rank."""

    layers: dict[str, Adapted]
    matrices: dict[str, tuple[Tensor, Tensor]]
    scale: float

    @contextmanager
    def active(self, dropout: tuple[float, int] | None = None) -> Iterator[None]:
        """Within this block the base model computes with this adapter. One block at a time in a process.

        ``dropout`` is a rate and a seed; each layer draws from its own, so that computing a layer twice
        drops the same.
        """
        try:
            for number, (name, (a, b)) in enumerate(self.matrices.items()):
                self.layers[name].update = (a, b, self.scale)
                self.layers[name].dropout = None if dropout is None else (dropout[0], dropout[1] + number)
            yield
        finally:
            for name in self.matrices:
                self.layers[name].update = self.layers[name].dropout = None


def attach(model: Any, targets: tuple[str, ...]) -> dict[str, Adapted]:
    """The layers of a model that ``targets`` names by the ends of their names, in order, ready to be adapted."""
    head = model.get_output_embeddings()
    modules = [(name, layer) for name, layer in model.named_modules() if layer is not head]
    linear = {name: layer for name, layer in modules if isinstance(layer, nn.Linear)}
    chosen = {name: layer for name, layer in linear.items() if _ending(name) in targets}
    missing = sorted(set(targets) - {_ending(name) for name in chosen})
    if missing or not chosen:
        there = ", ".join(sorted({_ending(name) for name in linear}))
        raise TrainingError(
            f"The base model has no linear layers called {', '.join(missing) or '(none named)'}; it has: {there}. "
            "Set the model's LoRA target_modules to some of these."
        )
    for layer in chosen.values():
        layer.__class__ = cast(Any, adapted(type(layer)))  # the module keeps its name, place and weights
    return cast(dict[str, Adapted], chosen)


def _ending(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def fresh(layers: Mapping[str, Adapted], lora: LoraSettings) -> dict[str, tuple[Tensor, Tensor]]:
    """A from kaiming-uniform, drawn in the order of the layers from the settings' seed, and B zero: no update yet."""
    generator = torch.Generator().manual_seed(lora.seed)
    made = {}
    for name, layer in layers.items():
        bound = 1 / math.sqrt(layer.in_features)
        a = torch.empty(lora.rank, layer.in_features).uniform_(-bound, bound, generator=generator)
        made[name] = (a, torch.zeros(layer.out_features, lora.rank))
    return made
