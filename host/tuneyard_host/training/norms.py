"""RMS normalisation with frozen weights, in one pass forward and one back: y = x w / sqrt(mean(x^2) + eps).

The library's own is six operations of which each keeps a tensor. On a CPU that is a tenth of a training step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _Normalise(torch.autograd.Function):
    """(..., n) -> (..., n); with i = 1 / sqrt(mean(x^2) + eps): dx = i g w - x i^3 mean(g w x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse: Tensor = norm.square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        scaled = grad * weight
        mean = torch.linalg.vecdot(scaled, x).unsqueeze(-1).div_(x.shape[-1])
        return scaled.mul_(inverse).addcmul_(x, mean.mul_(inverse.pow(3)), value=-1), None, None


_normalise: Callable[..., Tensor] = _Normalise.apply


class FrozenRMSNorm(nn.Module):
    """Takes the place of a library's class on a module that keeps its weight."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., n) -> (..., n)."""
        return _normalise(hidden_states, self.weight, self.variance_epsilon)


def quicken(model: nn.Module) -> None:
    """Give a frozen fp32 model the fast norm wherever it computes what the model's own does; others stay."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not type(module).__name__.endswith("RMSNorm") or not hasattr(module, "variance_epsilon"):
            continue
        if weight is None or weight.dtype != torch.float32 or weight.device.type != "cpu":
            continue
        sample = torch.linspace(-2, 3, 4 * weight.numel()).view(4, -1)
        with torch.no_grad():
            wanted = module(sample)
            if torch.allclose(
                _normalise(sample, weight, module.variance_epsilon), wanted, rtol=1e-5, atol=1e-6
            ):
                module.__class__ = FrozenRMSNorm
