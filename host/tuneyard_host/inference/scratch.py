"""Where a pass over some tokens writes what it computes on the way.

At a few tokens most of a step's time goes into calling torch, and a view costs as much as a small product. So the
tensors of a pass, and all views of them, are made once and serve every layer, and every step with as many tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Norm:
    """x over the root of its mean square, times a weight, for x (..., D) of one shape."""

    def __init__(self, shape: tuple[int, ...], epsilon: float, like: Tensor) -> None:
        *rows, size = shape
        self.out = like.new_empty(shape)
        self.epsilon, self._size = epsilon, size
        self._plain = like.device.type == "cpu" and like.dtype == torch.float32
        self._squares = torch.empty_like(self.out)
        self._flat = self._squares.view(-1, size)
        self._mean = like.new_full((size,), 1 / size)
        self._epsilons = like.new_full((len(self._flat),), epsilon)
        self._scale = torch.empty_like(self._epsilons)
        self._column = self._scale.view(*rows, 1)

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """The same tensor at every call."""
        if not self._plain:
            return torch.mul(F.rms_norm(x, (self._size,), None, self.epsilon), weight, out=self.out)
        # Torch's own takes seven passes; a matrix product sums faster than its sum does.
        torch.mul(x, x, out=self._squares)
        torch.addmv(self._epsilons, self._flat, self._mean, out=self._scale).rsqrt_()
        return torch.mul(x, self._column, out=self.out).mul_(weight)


class Scratch:
    """The tensors of a pass over T tokens, of which each layer overwrites those of the layer before."""

    def __init__(
        self, tokens: int, heads: int, kv_heads: int, head_dim: int, inner: int, norm: Norm, head_norm: bool
    ) -> None:
        """``inner``: the width of gate and up; ``norm``: that of the hidden states (T, D)."""
        new, half, turning = norm.out.new_empty, head_dim // 2, heads + kv_heads
        self.tokens, self.norm = tokens, norm
        self.qkv = new(tokens, (turning + kv_heads) * head_dim)
        whole = self.qkv.view(tokens, -1, head_dim)
        self.q, self.qk, self.kv = whole[:, :heads], whole[:, :turning], whole[:, heads:]
        self.head_norm = Norm((tokens, turning, head_dim), norm.epsilon, norm.out) if head_norm else None
        unturned = self.qk if self.head_norm is None else self.head_norm.out
        self.halves = unturned[..., half:], unturned[..., :half]
        self.turned = new(tokens, turning, head_dim)
        self.gate_up = new(tokens, 2 * inner)
        self.gate, self.up = self.gate_up.chunk(2, -1)
