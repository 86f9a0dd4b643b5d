"""The network of a Qwen3 or Llama model, written out, over the rows of a static key-value memory.

Its weights are those of the Hugging Face model (fused ones replace their parts, which become views of them), and so
are its logits. What it leaves out is what makes ``generate`` slow on small machines: cache objects, masks made anew
for every layer, and many small operations where a few will do.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import Chunk, Segment
from .lora import Mix
from .weights import Layer, Linear, layers_of

Look = Callable[[int, Tensor], Tensor]
"""(layer, queries (T, H, d)) -> the values that they find in memory, mixed (T, H * d)."""

LONG_ROW = 256
"""What a separate attention call for one row costs, in positions that a batched call could look at instead."""


class Network:
    """A causal language model that reads and writes rows of key-value memory."""

    def __init__(self, model: Any, context: int) -> None:
        config = model.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // self.heads)
        self.epsilon: float = config.rms_norm_eps
        self.embedding: Tensor = model.model.embed_tokens.weight
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        self._plain = self.device.type == "cpu" and self.dtype == torch.float32
        """Where a few products of matrices are faster than torch's own kernels for attention and norms."""
        self.layers: list[Layer] = layers_of(model, context)
        self.norm: Tensor = model.model.norm.weight
        self.head = Linear(model.lm_head.weight.T, getattr(model.lm_head, "bias", None))
        cos, sin = model.model.rotary_emb(self.embedding[:1], torch.arange(context, device=self.device)[None])
        half = self.head_dim // 2
        self.cos: Tensor = cos[0, :, None]
        self.sin: Tensor = torch.cat((-sin[0, :, None, :half], sin[0, :, None, half:]), -1)
        self._known: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def row_bytes(self, context: int) -> int:
        """What one row of key-value memory takes."""
        size: int = len(self.layers) * 2 * self.kv_heads * context * self.head_dim
        return size * self.embedding.element_size()

    def most_bytes(self) -> int:
        """What keys and values may take when nothing else is said: a quarter of the machine's memory."""
        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[1] // 4)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4

    def memory(self, rows: int, context: int) -> Tensor:
        """Key-value memory (layers, 2, rows, Hkv, context, d), all zeros."""
        shape = (len(self.layers), 2, rows, self.kv_heads, context, self.head_dim)
        if self.device.type == "cpu":
            return _untouched(math.prod(shape) * self.embedding.element_size(), self.dtype).view(shape)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def prefill(self, segments: list[Segment], memory: Tensor, mix: Mix) -> Tensor:
        """Read the next part of some prompts; the hidden states (T, D) of their tokens, one after the other."""
        chunk = Chunk(segments, self.heads // self.kv_heads, self.dtype, self.device)
        keys_at = chunk.lanes(self.kv_heads, memory.shape[4])

        def look(layer: int, q: Tensor) -> Tensor:
            return chunk.mix(memory[layer], q)

        return self._blocks(chunk.tokens, chunk.positions, keys_at, memory, look, mix)

    def decode(self, tokens: np.ndarray, positions: np.ndarray, memory: Tensor, mix: Mix) -> Tensor:
        """One more token (B,) for each of the first B rows, at its position (B,); hidden states (B, D)."""
        batch, context = len(tokens), memory.shape[4]
        reach, long = _reach(positions)
        seen = torch.arange(reach) <= torch.from_numpy(positions)[:, None]
        mask = torch.zeros(batch, 1, 1, reach, dtype=self.dtype)
        mask = mask.masked_fill_(~seen[:, None, None], -torch.inf).to(self.device)
        heads = np.arange(batch)[:, None] * self.kv_heads + np.arange(self.kv_heads)
        keys_at = torch.from_numpy(heads * context + positions[:, None]).to(self.device)
        mix_near = self._by_products(memory, mask) if self._plain else self._by_kernel(memory, mask)

        def look(layer: int, q: Tensor) -> Tensor:
            # The query heads that share a key head stand where other positions would: all see the same keys.
            queries = q.view(batch, self.kv_heads, -1, self.head_dim)
            mixed = mix_near(layer, queries)
            for row in long:
                keys, values = memory[layer, :, row : row + 1, :, : positions[row] + 1].unbind()
                mixed[row] = F.scaled_dot_product_attention(queries[row : row + 1], keys, values)[0]
            return mixed.view(batch, -1)

        tokens_here, positions_here = (
            torch.from_numpy(array).to(self.device) for array in (tokens, positions)
        )
        return self._blocks(tokens_here, positions_here, keys_at, memory, look, mix)

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, D) -> (B, V) in fp32."""
        return self.head(self._rms(hidden, self.norm)).float()

    def _blocks(
        self, tokens: Tensor, positions: Tensor, keys_at: Tensor, memory: Tensor, look: Look, mix: Mix
    ) -> Tensor:
        """Token ids (T,) -> hidden states (T, D), all but what looks at memory in the order that the mix wants.

        ``keys_at`` (T, Hkv): where the keys of each token go, in a layer's memory seen as (-1, d).
        """
        tokens, positions, keys_at = map(mix.arranged, (tokens, positions, keys_at))
        values_at = keys_at + memory[0, 0, ..., 0].numel()
        lanes = memory.view(len(memory), -1, self.head_dim).unbind()
        x = F.embedding(tokens, self.embedding)
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        turning = self.heads + self.kv_heads
        for i, layer in enumerate(self.layers):
            h = self._rms(x, layer.norm)
            qkv = mix.add(i, "qkv", h, layer.qkv(h)).view(len(x), -1, self.head_dim)
            qk = qkv[:, :turning]
            if layer.head_norm is not None:
                qk = self._rms(qk, layer.head_norm)
            qk = (qk * cos).addcmul_(qk.roll(self.head_dim // 2, -1), sin)
            lanes[i].index_put_((keys_at,), qk[:, self.heads :])
            lanes[i].index_put_((values_at,), qkv[:, turning:])
            h = mix.arranged(look(i, mix.restored(qk[:, : self.heads])))
            x = mix.add(i, "o", h, layer.o.onto(x, h))
            h = self._rms(x, layer.mlp_norm)
            gate, up = mix.add(i, "gate_up", h, layer.gate_up(h)).chunk(2, -1)
            h = F.silu(gate).mul_(up)
            x = mix.add(i, "down", h, layer.down.onto(x, h))
        return mix.restored(x)

    def _by_kernel(self, memory: Tensor, mask: Tensor) -> Look:
        """Torch's own attention of queries (B, Hkv, G, d) under a mask (B, 1, 1, reach)."""
        near = memory[:, :, : len(mask), :, : mask.shape[-1]].unbind()

        def mixed(layer: int, queries: Tensor) -> Tensor:
            keys, values = near[layer]
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)

        return mixed

    def _by_products(self, memory: Tensor, mask: Tensor) -> Look:
        """The same; on a CPU, over short rows, in two thirds of the time."""
        seen = mask.expand(-1, self.kv_heads, self.heads // self.kv_heads, -1).flatten(0, 1)
        near = memory.flatten(2, 3)[:, :, : len(seen), : mask.shape[-1]]
        keys, values = near[:, 0].mT.unbind(), near[:, 1].unbind()
        scale = self.head_dim**-0.5

        def mixed(layer: int, queries: Tensor) -> Tensor:
            asked = queries.reshape(len(seen), -1, self.head_dim)
            shares = torch.baddbmm(seen, asked, keys[layer], alpha=scale).softmax(-1)
            return shares.bmm(values[layer]).view(queries.shape)

        return mixed

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        """x (..., D) over the root of its mean square, times the weight."""
        if not self._plain:
            scaled = F.rms_norm(x, (x.shape[-1],), None, self.epsilon)
            return scaled * weight
        # Torch's own takes seven passes; a matrix product sums faster than its sum does.
        flat = x.reshape(-1, x.shape[-1])
        mean, epsilon = self._constants(*flat.shape)
        scale = torch.addmv(epsilon, flat * flat, mean).rsqrt_()
        return (x * scale.view(*x.shape[:-1], 1)).mul_(weight)

    def _constants(self, rows: int, size: int) -> tuple[Tensor, Tensor]:
        """1 / size for each column, and epsilon for each row."""
        found = self._known.get((rows, size))
        if found is None:
            found = torch.full((size,), 1 / size), torch.full((rows,), self.epsilon)
            self._known[rows, size] = found
        return found


def _untouched(size: int, dtype: torch.dtype) -> Tensor:
    """Zeros that take memory page by page as they are written: a row's unused context costs nothing."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    area = mmap.mmap(-1, size, **private)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        area.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(area, dtype=dtype)


def _reach(positions: np.ndarray) -> tuple[int, list[int]]:
    """How far one attention call for all rows looks, and the few rows, if any, that are better done on their own."""
    order = np.argsort(-positions)
    lengths = positions[order] + 1
    apart = np.concatenate(([0], np.cumsum(lengths + LONG_ROW)))[:-1]
    count = int(np.argmin(apart + lengths * len(lengths)))
    return int(lengths[count]), order[:count].tolist()
