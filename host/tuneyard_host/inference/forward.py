"""The network of a Qwen3 or Llama model, written out, over the rows of a static key-value memory.

Its weights are those of the Hugging Face model (fused ones replace their parts, which become views of them), and so
are its logits. What it leaves out is what makes ``generate`` slow on small machines: cache objects, mask building and
one Python call per projection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tuneyard.errors import TrainingError

from .lora import Mix

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
STATIC_ROPES = ("default", "linear", "llama3", "yarn")

Attend = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, queries (T, H, d), keys and values (T, 2, Hkv, d)) -> mixed values (T, H * d)."""


@dataclass(frozen=True)
class Linear:
    """A projection, or several that read the same input fused into one."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class Layer:
    """The weights of one transformer block."""

    norm: Tensor
    qkv: Linear
    head_norm: Tensor | None
    """(H + Hkv, d): the q-norm repeated for each query head, then the k-norm for each key head."""
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Segment:
    """The next tokens of one row's prompt: their keys and values go to ``start`` and on."""

    row: int
    start: int
    tokens: Any
    """np.ndarray of int, (n,)"""


class Network:
    """A causal language model that reads and writes rows of key-value memory."""

    def __init__(self, model: Any, context: int) -> None:
        config = model.config
        _check(config, context)
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.epsilon, self.vocabulary_size = config.rms_norm_eps, config.vocab_size
        self.embedding: Tensor = model.model.embed_tokens.weight
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        self.norm: Tensor = model.model.norm.weight
        self.head = Linear(model.lm_head.weight, getattr(model.lm_head, "bias", None))
        self.layers = [self._layer(block) for block in model.model.layers]
        positions = torch.arange(context, device=self.device)[None]
        cos, sin = model.model.rotary_emb(self.embedding[:1], positions)
        half = self.head_dim // 2
        self.cos: Tensor = cos[0, :, None]
        self.sin: Tensor = torch.cat((-sin[0, :, None, :half], sin[0, :, None, half:]), -1)

    def _layer(self, block: Any) -> Layer:
        attention, mlp = block.self_attn, block.mlp
        head_norm = None
        if hasattr(attention, "q_norm"):
            scales = [attention.q_norm.weight] * self.heads + [attention.k_norm.weight] * self.kv_heads
            head_norm = torch.stack(scales)
        return Layer(
            norm=block.input_layernorm.weight,
            qkv=_fuse(attention.q_proj, attention.k_proj, attention.v_proj),
            head_norm=head_norm,
            o=_fuse(attention.o_proj),
            mlp_norm=block.post_attention_layernorm.weight,
            gate_up=_fuse(mlp.gate_proj, mlp.up_proj),
            down=_fuse(mlp.down_proj),
        )

    def row_bytes(self, context: int) -> int:
        """What one row of key-value memory takes."""
        return len(self.layers) * 2 * self.kv_heads * context * self.head_dim * self.embedding.element_size()

    def memory(self, rows: int, context: int) -> Tensor:
        """Key-value memory (layers, rows, 2, Hkv, context, d), all zeros."""
        shape = (len(self.layers), rows, 2, self.kv_heads, context, self.head_dim)
        if self.device.type == "cpu" and self.dtype == torch.float32:
            import numpy as np

            return torch.from_numpy(np.zeros(shape, np.float32))  # unlike torch's, takes pages only when written
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def prefill(self, segments: list[Segment], memory: Tensor, mix: Mix) -> Tensor:
        """Read the next part of some prompts; the hidden states (T, D) of all their tokens, one after the other."""
        spans = [(s.row, s.start, s.start + len(s.tokens)) for s in segments]
        tokens = torch.cat([torch.as_tensor(s.tokens, dtype=torch.long) for s in segments]).to(self.device)
        positions = torch.cat([torch.arange(start, end) for _, start, end in spans]).to(self.device)
        masks = [_causal(start, end, self.device) for _, start, end in spans]
        groups = self.heads // self.kv_heads

        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            parts, at = [], 0
            for (row, start, end), mask in zip(spans, masks, strict=True):
                n = end - start
                lane = memory[layer, row]
                lane[:, :, start:end] = kv[at : at + n].permute(1, 2, 0, 3)
                keys = lane[0, None, :, :end].repeat_interleave(groups, 1)
                values = lane[1, None, :, :end].repeat_interleave(groups, 1)
                queries = q[None, at : at + n].transpose(1, 2)
                mixed = F.scaled_dot_product_attention(
                    queries, keys, values, attn_mask=mask, is_causal=mask is None and n > 1
                )
                parts.append(mixed[0].transpose(0, 1).reshape(n, -1))
                at += n
            return torch.cat(parts)

        return self._blocks(tokens, positions, attend, mix)

    def decode(self, tokens: Tensor, positions: Tensor, memory: Tensor, reach: int, mix: Mix) -> Tensor:
        """One more token (B,) for each of the first B rows, at its position; hidden states (B, D).

        ``reach`` is larger than any position: how much of each row attention looks at.
        """
        rows = torch.arange(len(tokens), device=self.device)
        mask = (torch.arange(reach, device=self.device) <= positions[:, None])[:, None, None]

        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            lane = memory[layer]
            lane[rows, :, :, positions] = kv
            near = lane[: len(tokens), :, :, :reach]
            # The query heads that share a key head stand where other positions would: all see the same keys.
            queries = q.view(len(tokens), self.kv_heads, -1, self.head_dim)
            mixed = F.scaled_dot_product_attention(queries, near[:, 0], near[:, 1], attn_mask=mask)
            return mixed.reshape(len(tokens), -1)

        return self._blocks(tokens, positions, attend, mix)

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, D) -> (B, V) in fp32."""
        return self.head(self._rms(hidden, self.norm)).float()

    def _blocks(self, tokens: Tensor, positions: Tensor, attend: Attend, mix: Mix) -> Tensor:
        """Token ids (T,) -> hidden states (T, D); ``attend`` stores keys and values and mixes over them."""
        x = F.embedding(tokens, self.embedding)
        cos, sin = self.cos[positions], self.sin[positions]
        count, turning = len(tokens), self.heads + self.kv_heads
        for i, layer in enumerate(self.layers):
            h = self._rms(x, layer.norm)
            qkv = mix.add(i, "qkv", h, layer.qkv(h)).view(count, -1, self.head_dim)
            qk = qkv[:, :turning]
            if layer.head_norm is not None:
                qk = F.rms_norm(qk, (self.head_dim,), None, self.epsilon) * layer.head_norm
            qk = torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, -1), sin)
            kv = torch.cat((qk[:, self.heads :], qkv[:, turning:]), 1).view(count, 2, -1, self.head_dim)
            h = attend(i, qk[:, : self.heads], kv)
            x = x + mix.add(i, "o", h, layer.o(h))
            h = self._rms(x, layer.mlp_norm)
            gate, up = mix.add(i, "gate_up", h, layer.gate_up(h)).chunk(2, -1)
            h = F.silu(gate) * up
            x = x + mix.add(i, "down", h, layer.down(h))
        return x

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.epsilon)


def _causal(start: int, end: int, device: torch.device) -> Tensor | None:
    """What the tokens start..end see of 0..end: (n, end) bool, or None where a plain triangle will do."""
    if start == 0 or end == start + 1:
        return None
    seen = torch.arange(end, device=device)
    return seen <= seen[start:, None]


def _fuse(*modules: Any) -> Linear:
    """Some projections of one input as one; the modules keep working, as views of it."""
    if len(modules) == 1:
        return Linear(modules[0].weight, modules[0].bias)
    weight = torch.cat([module.weight.data for module in modules])
    bias = None if modules[0].bias is None else torch.cat([module.bias.data for module in modules])
    at = 0
    for module in modules:
        module.weight.data = weight[at : at + module.out_features]
        at += module.out_features
    return Linear(weight, bias)


def _check(config: Any, context: int) -> None:
    """Refuse, with the reason, a model that this network would compute wrongly."""
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) if sliding or config.model_type == "mistral" else None
    rope = config.rope_parameters["rope_type"]
    reasons = {
        f"model_type {config.model_type!r} (known: {', '.join(FAMILIES)})": config.model_type not in FAMILIES,
        f"a sliding window of {window} tokens": window is not None and window < context,
        f"the activation {config.hidden_act!r}": config.hidden_act != "silu",
        f"rope of type {rope!r} (known: {', '.join(STATIC_ROPES)})": rope not in STATIC_ROPES,
    }
    wrong = [reason for reason, holds in reasons.items() if holds]
    if wrong:
        raise TrainingError(f"The inference engine cannot run this base model: it has {', and '.join(wrong)}.")
