"""LoRA adapters, and any mix of them in one batch.

The adapters of a batch are laid side by side: h = x A, where A has the columns of every adapter; the columns that are
not a row's own are set to zero; y = y + h B. Two matrix products per site whatever the mix, and exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        self.adapters = tuple(adapters)
        self.index = {adapter.id: i for i, adapter in enumerate(adapters)}
        self._pairs: list[dict[str, Pair]] = []
        self._own: dict[str, Tensor] = {}
        self._masks: dict[str, Tensor] | None = None
        if not adapters:
            return
        for layer in range(len(adapters[0].pairs)):
            pairs = [adapter.pairs[layer] for adapter in adapters]
            self._pairs.append({site: _side_by_side([pair[site] for pair in pairs]) for site in SITES})
        for site in SITES:
            ranks = [adapter.rank(site) for adapter in adapters]
            a = self._pairs[0][site][0]
            own = torch.zeros(len(adapters) + 1, sum(ranks), dtype=a.dtype, device=a.device)
            for i, rank in enumerate(ranks):
                own[i, sum(ranks[:i]) : sum(ranks[:i]) + rank] = 1
            self._own[site] = own

    def covers(self, adapters: Sequence[Adapter]) -> bool:
        """Whether this mix can serve them, without carrying more than twice their number."""
        needed = {adapter.id for adapter in adapters}
        return needed <= self.index.keys() and len(self.adapters) <= max(2 * len(needed), 0)

    def choose(self, owners: Sequence[Adapter | None]) -> Mix:
        """Say which adapter each row of the coming batch has; None is the base model."""
        if not self.adapters:
            return self
        picks = [-1 if owner is None else self.index[owner.id] for owner in owners]
        self._masks = None
        if len(self.adapters) > 1 or -1 in picks:
            index = torch.tensor(picks, device=self._own["o"].device)
            self._masks = {site: own[index] for site, own in self._own.items()}
        return self

    def add(self, layer: int, site: str, x: Tensor, y: Tensor) -> Tensor:
        """y (T, out) plus the rows' own low-rank changes of x (T, in)."""
        if not self._pairs:
            return y
        a, b = self._pairs[layer][site]
        h = x @ a
        if self._masks is not None:
            h = h * self._masks[site]
        return torch.addmm(y, h, b)


def _side_by_side(pairs: list[Pair]) -> Pair:
    return torch.cat([a for a, _ in pairs], 1), torch.cat([b for _, b in pairs], 0)


def parse(id: str, weights: bytes, config: dict[str, Any], model: Any) -> Adapter:
    """An adapter from the two files of a PEFT folder, checked against the base model it is for.

    Raises Invalid with the reason when it has parts that are not plain LoRA on the linear layers.
    """
    odd = [name for name in UNSUPPORTED if config.get(name)]
    if config.get("peft_type", "LORA") != "LORA" or odd:
        raise Invalid(f"The adapter {id!r} is not plain LoRA: {', '.join(odd) or config['peft_type']}.")
    tensors = {name.removeprefix("base_model.model."): tensor for name, tensor in load_safetensors(weights).items()}
    used: set[str] = set()
    layers = [
        {site: _pair(block, i, site, tensors, config, used) for site in SITES}
        for i, block in enumerate(model.model.layers)
    ]
    if tensors.keys() - used:
        raise Invalid(f"The adapter {id!r} changes {sorted(tensors.keys() - used)[0]!r}, which cannot be served.")
    for site in SITES:
        widest = max(layer[site][0].shape[1] for layer in layers)
        for layer in layers:
            layer[site] = _widened(layer[site], widest)
    return Adapter(id, layers, sum(t.nbytes for layer in layers for pair in layer.values() for t in pair))


def _pair(block: Any, i: int, site: str, tensors: dict[str, Tensor], config: dict[str, Any], used: set[str]) -> Pair:
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
            if a.shape[1] != module.in_features or b.shape[0] != module.out_features or a.shape[0] != b.shape[1]:
                raise Invalid(f"The adapter's {path} is {tuple(b.shape)} x {tuple(a.shape)}: it is not for this base model.")
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
