"""Attention over a packed row, ours and not the library's: packed conversations must never see each other.

A row is a forest of conversations in depth-first order. A run is a stretch of tokens without a branch. Its tokens see
those before them in the run and the runs above it, and nothing else; so a run is seen whole by all that descends from
it, which stands right behind it. On a CPU that is how it is computed: each run by itself, then each run by its
descendants, the parts weighed by their normalisers. No mask is built and no key is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from tuneyard.errors import TrainingError

NAME = "tuneyard_packed"
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Part(NamedTuple):
    """Tokens of a row that look at tokens of a row: each at those up to itself when causal, else all at all."""

    queries: slice
    keys: slice
    causal: bool


@dataclass
class Forest:
    """Who sees whom: the length of each run of a row, and the path of runs from its root down to itself."""

    lengths: list[int]
    paths: list[list[int]]

    @cached_property
    def span(self) -> int:
        """The longest path in tokens: no attention reaches further back."""
        return max(sum(self.lengths[run] for run in path) for path in self.paths)

    @cached_property
    def parts(self) -> list[Part]:
        """Each run by itself, then each run as its descendants see it: together, all that is seen, once."""
        starts = list(accumulate(self.lengths, initial=0))
        ends = starts[1:]
        for run, path in enumerate(self.paths):
            for above in path:
                ends[above] = max(ends[above], starts[run + 1])
        runs = [slice(start, stop) for start, stop in pairwise(starts)]
        return [Part(run, run, True) for run in runs] + [
            Part(slice(run.stop, end), run, False)
            for run, end in zip(runs, ends, strict=True)
            if end > run.stop
        ]


def packed(
    _module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    forest: Forest,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer over one row: (1, heads, T, size) in, (1, T, heads, size) out."""
    window = options.get("sliding_window")
    if window is not None and forest.span > window:
        raise TrainingError(
            f"This base model attends over a sliding window of {window} tokens, and a conversation has "
            f"{forest.span}: train on shorter ones."
        )
    heads = key.shape[1]
    repeats = query.shape[1] // heads
    queries = query[0].unflatten(0, (heads, repeats)).transpose(0, 1)  # (repeats, key heads, T, size)
    keys, values = key.expand(repeats, -1, -1, -1), value.expand(repeats, -1, -1, -1)
    attend = in_parts if query.device.type == "cpu" else in_runs
    seen = attend(queries, keys, values, forest, options["scaling"])
    return seen.permute(2, 1, 0, 3).flatten(1, 2)[None], None


def in_runs(queries: Tensor, keys: Tensor, values: Tensor, forest: Forest, scale: float) -> Tensor:
    """Each run against its whole path, whose last tokens it is: for any device, and to test the other way against.

    On a GPU that is the flash kernel, on a CPU a mask.
    """
    pieces = [tensor.split(forest.lengths, dim=2) for tensor in (queries, keys, values)]
    seen = []
    for path in forest.paths:
        query = pieces[0][path[-1]]
        key, value = (torch.cat([piece[run] for run in path], dim=2) for piece in pieces[1:])
        sees = causal_lower_right(query.shape[2], key.shape[2])
        seen.append(scaled_dot_product_attention(query, key, value, attn_mask=sees, scale=scale))
    return torch.cat(seen, dim=2)


class _InParts(torch.autograd.Function):
    """softmax(q k^T) v over the parts of a row, each by the library's kernel, which also tells its normaliser.

    With out and log-normaliser of the whole, the kernel's backward pass gives each part's share of the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, parts: list[Part], scale: float
    ) -> Tensor:
        out = torch.empty_like(queries)
        normaliser = torch.empty(queries.shape[:3], dtype=torch.float32)
        for q, k, causal in parts:
            seen, norm = _forward(
                queries[:, :, q], keys[:, :, k], values[:, :, k], is_causal=causal, scale=scale
            )
            if causal:
                out[:, :, q], normaliser[:, :, q] = seen, norm
                continue
            both = torch.logaddexp(normaliser[:, :, q], norm)
            out[:, :, q].mul_((normaliser[:, :, q] - both).exp_()[..., None].to(out.dtype))
            out[:, :, q].addcmul_(seen, (norm - both).exp_()[..., None].to(out.dtype))
            normaliser[:, :, q] = both
        ctx.save_for_backward(queries, keys, values, out, normaliser)
        ctx.parts, ctx.scale = parts, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, out, normaliser = ctx.saved_tensors
        totals = [torch.empty_like(queries) for _ in range(3)]
        for q, k, causal in ctx.parts:
            shares = _backward(
                grad[:, :, q], queries[:, :, q], keys[:, :, k], values[:, :, k], out[:, :, q], normaliser[:, :, q],
                dropout_p=0.0, is_causal=causal, scale=ctx.scale,
            )  # fmt: skip
            for total, share, where in zip(totals, shares, (q, k, k), strict=True):
                if causal:
                    total[:, :, where] = share
                else:
                    total[:, :, where] += share
        return *totals, None, None


_in_parts: Callable[..., Tensor] = _InParts.apply


def in_parts(queries: Tensor, keys: Tensor, values: Tensor, forest: Forest, scale: float) -> Tensor:
    """Each run by itself and by its descendants: the fast way, on a CPU."""
    return _in_parts(queries, keys, values, forest.parts, scale)


AttentionInterface.register(NAME, packed)


@contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """Within this block the model attends by ``packed``; no mask of the library's is built for it."""
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
