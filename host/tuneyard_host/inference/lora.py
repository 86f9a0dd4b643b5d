"""LoRA adapters, and any mix of them in one batch: y + (x A) B with each row's own A and B.

A batch is computed in an order in which the rows of an adapter stand together. Where all adapters have equally many,
two batched matrix products per site do the work of all, in place; else each adapter's part is changed on its own. Only
where that would be many small products are the rows gathered for each site, into groups padded to equal size. No row
pays for another's adapter, and each adapter is read once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor

from tuneyard.errors import Invalid

SITES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
UNSUPPORTED = ("use_dora", "modules_to_save", "trainable_token_indices", "layer_replication", "lora_bias")

FEW = 16
"""Rows of an adapter, on average, below which two products of its own cost more than gathering and padding."""

Pair = tuple[Tensor, Tensor]
"""A (in, R) and B (R, out) of one site; the scale is in B."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA adapter in memory: one pair per layer and site, with the same R for a site in every layer."""

    id: str
    pairs: list[dict[str, Pair]]
    bytes: int

    def rank(self, site: str) -> int:
        return self.pairs[0][site][0].shape[1]


class Mix:
    """The adapters of one batch; ``add`` gives each row the change of its own adapter."""

    def __init__(self, adapters: Sequence[Adapter | None]) -> None:
        """``adapters``: each different one that rows of the batch have; None is the base model, which adds nothing."""
        real = [adapter for adapter in adapters if adapter is not None]
        self._index = {adapter.id: i for i, adapter in enumerate(real)}
        self._pairs: list[dict[str, Pair]] = []
        """(n, in, R) and (n, R, out) for each layer and site."""
        self._names: list[str] = []
        self._sizes: list[int] = []
        """How many rows each adapter has."""
        self._even = True
        self._real = 0
        """How many have one: those come first."""
        self._order: Tensor | None = None
        self._back: Tensor | None = None
        self._padded: tuple[Tensor, Tensor] | None = None
        """Which rows stand in groups of equal size, and where each row stands among them."""
        ranks = {site: max((adapter.rank(site) for adapter in real), default=0) for site in SITES}
        for layer in range(len(real[0].pairs) if real else 0):
            pairs = [adapter.pairs[layer] for adapter in real]
            self._pairs.append(
                {site: _stacked([pair[site] for pair in pairs], ranks[site]) for site in SITES}
            )

    def covers(self, adapters: Sequence[Adapter | None]) -> bool:
        """Whether this mix can serve them, without carrying twice their number."""
        needed = {adapter.id for adapter in adapters if adapter is not None}
        return needed <= self._index.keys() and len(self._index) < 2 * max(1, len(needed))

    def choose(self, owners: Sequence[Adapter | None]) -> Mix:
        """Say which adapter each row of the coming batch has."""
        names = ["" if owner is None else owner.id for owner in owners]
        if names != self._names:
            self._names = names
            count = len(self._index)
            places = np.array([self._index[name] if name else count for name in names])
            *self._sizes, plain = np.bincount(places, minlength=count + 1).tolist()
            self._real = len(names) - plain
            self._even = len(set(self._sizes)) < 2
            few = not self._even and self._real < FEW * np.count_nonzero(self._sizes)
            order = (places == count if few else places).argsort(kind="stable")
            self._padded = self._padding(places[order[: self._real]]) if few else None
            self._order = self._back = None
            if (order[1:] < order[:-1]).any():
                self._order, self._back = self._placed(order), self._placed(order.argsort())
        return self

    def arranged(self, x: Tensor) -> Tensor:
        """x (T, ...) in the order in which this mix computes."""
        return x if self._order is None else x.index_select(0, self._order)

    def restored(self, x: Tensor) -> Tensor:
        """x (T, ...) in the order of the batch again."""
        return x if self._back is None else x.index_select(0, self._back)

    def add(self, layer: int, site: str, x: Tensor, y: Tensor) -> Tensor:
        """y (T, out), changed in place by the rows' own low-rank functions of x (T, in), both arranged."""
        if not self._real:
            return y
        a, b = self._pairs[layer][site]
        if self._real < len(x):
            self._add(a, b, x[: self._real], y[: self._real])
        else:
            self._add(a, b, x, y)
        return y

    def _add(self, a: Tensor, b: Tensor, x: Tensor, y: Tensor) -> None:
        if len(a) == 1:
            y.addmm_(x.mm(a[0]), b[0])
        elif self._even:
            y.view(len(b), -1, y.shape[1]).baddbmm_(x.view(len(a), -1, x.shape[1]).bmm(a), b)
        elif self._padded is not None:
            groups, places = self._padded
            changes = x.index_select(0, groups).view(len(a), -1, x.shape[1]).bmm(a).bmm(b)
            y.add_(changes.view(-1, y.shape[1]).index_select(0, places))
        else:
            for own, changed, down, up in zip(x.split(self._sizes), y.split(self._sizes), a, b, strict=True):
                if len(own):
                    changed.addmm_(own.mm(down), up)

    def _padding(self, adapters: np.ndarray) -> tuple[Tensor, Tensor]:
        """Groups for rows that have these adapters."""
        together, sizes = adapters.argsort(kind="stable"), np.array(self._sizes)
        slots = np.arange(sizes.max())
        there = slots < sizes[:, None]
        groups = np.zeros(there.shape, np.int64)
        groups[there] = together
        places = np.empty_like(together)
        places[together] = np.flatnonzero(there)
        return self._placed(groups.ravel()), self._placed(places)

    def _placed(self, index: np.ndarray) -> Tensor:
        return torch.from_numpy(index).to(self._pairs[0]["o"][0].device)


def _stacked(pairs: list[Pair], rank: int) -> Pair:
    widened = [_widened(pair, rank) for pair in pairs]
    if len(widened) == 1:
        return widened[0][0][None], widened[0][1][None]
    return torch.stack([a for a, _ in widened]), torch.stack([b for _, b in widened])


def parse(id: str, weights: bytes, config: dict[str, Any], model: Any) -> Adapter:
    """An adapter from the two files of a PEFT folder, checked against the base model it is for.

    Raises Invalid with the reason when it has parts that are not plain LoRA on the linear layers.
    """
    odd = [name for name in UNSUPPORTED if config.get(name)]
    if config.get("peft_type", "LORA") != "LORA" or odd:
        raise Invalid(f"The adapter {id!r} is not plain LoRA: {', '.join(odd) or config['peft_type']}.")
    tensors = {
        name.removeprefix("base_model.model."): tensor for name, tensor in load_safetensors(weights).items()
    }
    used: set[str] = set()
    layers = [
        {site: _pair(block, i, site, tensors, config, used) for site in SITES}
        for i, block in enumerate(model.model.layers)
    ]
    if tensors.keys() - used:
        raise Invalid(
            f"The adapter {id!r} changes {sorted(tensors.keys() - used)[0]!r}, which cannot be served."
        )
    for site in SITES:
        widest = max(layer[site][0].shape[1] for layer in layers)
        for layer in layers:
            layer[site] = _widened(layer[site], widest)
    return Adapter(id, layers, sum(t.nbytes for layer in layers for pair in layer.values() for t in pair))


def _pair(
    block: Any, i: int, site: str, tensors: dict[str, Tensor], config: dict[str, Any], used: set[str]
) -> Pair:
    """One site's pair: the modules that share its input, side by side, each writing its own part of the output."""
    modules = [(name, block.get_submodule(name)) for name in SITES[site]]
    like = modules[0][1].weight
    parts: list[tuple[Tensor, Tensor, int]] = []
    at = 0
    for name, module in modules:
        path = f"model.layers.{i}.{name}"
        keys = f"{path}.lora_A.weight", f"{path}.lora_B.weight"
        if keys[0] in tensors and keys[1] in tensors:
            a, b = (tensors[key].to(like) for key in keys)
            if (
                a.shape[1] != module.in_features
                or b.shape[0] != module.out_features
                or a.shape[0] != b.shape[1]
            ):
                raise Invalid(
                    f"The adapter's {path} is {tuple(b.shape)} x {tuple(a.shape)}: it is not for this base model."
                )
            used.update(keys)
            parts.append((a, b * _scale(path, a.shape[0], config), at))
        at += module.out_features
    rank = sum(a.shape[0] for a, _, _ in parts)
    down, up = like.new_zeros(modules[0][1].in_features, rank), like.new_zeros(rank, at)
    row = 0
    for a, b, column in parts:
        down[:, row : row + a.shape[0]] = a.T
        up[row : row + a.shape[0], column : column + b.shape[0]] = b.T
        row += a.shape[0]
    return down, up


def _scale(path: str, rank: int, config: dict[str, Any]) -> float:
    """alpha / r, with PEFT's per-module patterns (a pattern names a module by the end of its path)."""
    alpha = config.get("lora_alpha", rank)
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if path == pattern or path.endswith("." + pattern):
            alpha = value
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _widened(pair: Pair, rank: int) -> Pair:
    a, b = pair
    more = rank - a.shape[1]
    if more == 0:
        return pair
    return torch.cat((a, a.new_zeros(a.shape[0], more)), 1), torch.cat((b, b.new_zeros(more, b.shape[1])))
