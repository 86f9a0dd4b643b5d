"""The weights of a Hugging Face model, laid out for our forward, without a second copy of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tuneyard.errors import TrainingError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
STATIC_ROPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Linear:
    """A projection (in, out), or several that read the same input, side by side."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x (T, in) -> (T, out)"""
        if self.bias is None:
            return torch.mm(x, self.weight, out=out)
        return torch.addmm(self.bias, x, self.weight, out=out)

    def onto(self, y: Tensor, x: Tensor) -> Tensor:
        """y (T, out) + the projection of x (T, in)"""
        whole = torch.addmm(y, x, self.weight)
        return whole if self.bias is None else whole.add_(self.bias)


@dataclass(frozen=True)
class Layer:
    """The weights of one transformer block."""

    norm: Tensor
    qkv: Linear
    head_norm: Tensor | None
    """(H + Hkv, d): the q-norm once for each query head, then the k-norm for each key head."""
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


def layers_of(model: Any, context: int) -> list[Layer]:
    """The blocks of a model; TrainingError, with the reason, for one that our forward would compute wrongly."""
    _check(model.config, context)
    return [_layer(block, model.config) for block in model.model.layers]


def _layer(block: Any, config: Any) -> Layer:
    attention, mlp = block.self_attn, block.mlp
    head_norm = None
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm.weight, attention.k_norm.weight
        head_norm = torch.stack([q] * config.num_attention_heads + [k] * config.num_key_value_heads)
    return Layer(
        norm=block.input_layernorm.weight,
        qkv=_side_by_side(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norm=head_norm,
        o=_side_by_side(attention.o_proj),
        mlp_norm=block.post_attention_layernorm.weight,
        gate_up=_side_by_side(mlp.gate_proj, mlp.up_proj),
        down=_side_by_side(mlp.down_proj),
    )


def _side_by_side(*modules: Any) -> Linear:
    """Some projections of one input as one. The modules keep working, as views of it.

    Stored as (in, out): on a CPU that is up to a third faster for small batches.
    """
    weight = torch.cat([module.weight.data.T for module in modules], 1).contiguous()
    bias = None if modules[0].bias is None else torch.cat([module.bias.data for module in modules])
    for module, part in zip(modules, weight.split([m.out_features for m in modules], 1), strict=True):
        module.weight.data = part.T
    return Linear(weight, bias)


def _check(config: Any, context: int) -> None:
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) if sliding or config.model_type == "mistral" else None
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    reasons = {
        f"model_type {config.model_type!r} (known: {', '.join(FAMILIES)})": config.model_type not in FAMILIES,
        f"a sliding window of {window} tokens": window is not None and window < context,
        f"the activation {getattr(config, 'hidden_act', None)!r}": getattr(config, "hidden_act", "")
        != "silu",
        f"rope of type {rope!r} (known: {', '.join(STATIC_ROPES)})": rope not in STATIC_ROPES,
    }
    wrong = [reason for reason, holds in reasons.items() if holds]
    if wrong:
        raise TrainingError(
            f"The inference engine cannot run this base model: it has {', and '.join(wrong)}."
        )
