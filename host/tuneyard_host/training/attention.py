"""Attention over a packed row, ours and not the library's, because packed documents must never see each
other.

A row is a forest of conversations in depth-first order. A run is a stretch of tokens without a branch; its
tokens see themselves, the runs above them, and nothing else. Each run is one call of scaled-dot-product
attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from tuneyard.errors import TrainingError

NAME = "tuneyard_packed"


@dataclass
class Forest:
    """Who sees whom: the length of each run of a row, and the path of runs from its root down to itself."""

    lengths: list[int]
    paths: list[list[int]]

    @cached_property
    def span(self) -> int:
        """The longest path in tokens: no attention reaches further back."""
        return max(sum(self.lengths[run] for run in path) for path in self.paths)

    def masks(self, like: Tensor) -> list[Tensor | None]:
        """For each run, who of its path each of its tokens sees: None for plain causal, else (length, path length)."""
        if not hasattr(self, "_masks"):
            self._masks = [self._mask(path, like) for path in self.paths]
        return self._masks

    def _mask(self, path: list[int], like: Tensor) -> Tensor | None:
        if len(path) == 1:
            return None
        rows, columns = self.lengths[path[-1]], sum(self.lengths[run] for run in path)
        return torch.ones(rows, columns, dtype=torch.bool, device=like.device).tril(columns - rows)


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
    repeats = query.shape[1] // key.shape[1]
    queries = query.split(forest.lengths, dim=2)
    keys = key.repeat_interleave(repeats, dim=1).split(forest.lengths, dim=2)
    values = value.repeat_interleave(repeats, dim=1).split(forest.lengths, dim=2)
    seen = [
        scaled_dot_product_attention(
            queries[path[-1]],
            keys[path[-1]] if causal is None else torch.cat([keys[run] for run in path], dim=2),
            values[path[-1]] if causal is None else torch.cat([values[run] for run in path], dim=2),
            attn_mask=causal,
            is_causal=causal is None,
            scale=options.get("scaling"),
        )
        for path, causal in zip(forest.paths, forest.masks(query), strict=True)
    ]
    return torch.cat(seen, dim=2).transpose(1, 2), None


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
