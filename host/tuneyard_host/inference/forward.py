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
from .scratch import Norm, Scratch
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
        self._places = torch.arange(context, device=self.device)
        self._seen, self._unseen = (self.embedding.new_tensor(bias) for bias in (0, -torch.inf))
        self._scratch = self._scratch_for(1)

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
        lanes = np.arange(batch * self.kv_heads).reshape(batch, -1) * context + positions[:, None]
        tokens_at, positions_at, keys_at = (
            torch.from_numpy(array).to(self.device) for array in (tokens, positions, lanes)
        )
        mask = torch.where(self._places[:reach] <= positions_at[:, None], self._seen, self._unseen)
        mix_near = self._by_products(memory, mask) if self._plain else self._by_kernel(memory, mask)

        def look(layer: int, q: Tensor) -> Tensor:
            # The query heads that share a key head stand where other positions would: all see the same keys.
            queries = q.view(batch, self.kv_heads, -1, self.head_dim)
            mixed = mix_near(layer, queries)
            for row in long:
                keys, values = memory[layer, :, row : row + 1, :, : positions[row] + 1].unbind()
                mixed[row] = F.scaled_dot_product_attention(queries[row : row + 1], keys, values)[0]
            return mixed.view(batch, -1)

        return self._blocks(tokens_at, positions_at, keys_at, memory, look, mix)

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, D) -> (B, V) in fp32."""
        known, rows = self._scratch, hidden.shape[0]
        norm = known.norm if known.tokens == rows else self._norm(rows)
        return self.head(norm(hidden, self.norm)).float()

    def _blocks(
        self, tokens: Tensor, positions: Tensor, keys_at: Tensor, memory: Tensor, look: Look, mix: Mix
    ) -> Tensor:
        """Token ids (T,) -> hidden states (T, D), all but what looks at memory in the order that the mix wants.

        ``keys_at`` (T, Hkv): where the keys of each token go, in a layer's memory seen as (-1, d).
        """
        tokens, positions, keys_at = map(mix.arranged, (tokens, positions, keys_at))
        kept_at = torch.cat((keys_at, keys_at + memory.stride(1) // self.head_dim), 1)
        lanes = memory.view(len(memory), -1, self.head_dim).unbind()
        x = F.embedding(tokens, self.embedding)
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        if self._scratch.tokens != x.shape[0]:
            self._scratch = self._scratch_for(x.shape[0])
        s = self._scratch
        for i, layer in enumerate(self.layers):
            h = s.norm(x, layer.norm)
            mix.add(i, "qkv", h, layer.qkv(h, out=s.qkv))
            qk = s.qk
            if s.head_norm is not None and layer.head_norm is not None:
                qk = s.head_norm(qk, layer.head_norm)
            torch.cat(s.halves, -1, out=s.turned)
            torch.addcmul(qk.mul_(cos), s.turned, sin, out=s.qk)
            lanes[i].index_put_((kept_at,), s.kv)
            h = mix.arranged(look(i, mix.restored(s.q)))
            x = mix.add(i, "o", h, layer.o.onto(x, h))
            h = s.norm(x, layer.mlp_norm)
            mix.add(i, "gate_up", h, layer.gate_up(h, out=s.gate_up))
            h = F.silu(s.gate).mul_(s.up)
            x = mix.add(i, "down", h, layer.down.onto(x, h))
        return mix.restored(x)

    def _scratch_for(self, tokens: int) -> Scratch:
        inner, head_norm = self.layers[0].down.weight.shape[0], self.layers[0].head_norm is not None
        heads = self.heads, self.kv_heads, self.head_dim
        return Scratch(tokens, *heads, inner, self._norm(tokens), head_norm)

    def _norm(self, tokens: int) -> Norm:
        return Norm((tokens, self.embedding.shape[1]), self.epsilon, self.embedding)

    def _by_kernel(self, memory: Tensor, mask: Tensor) -> Look:
        """Torch's own attention of queries (B, Hkv, G, d) under a mask (B, reach)."""
        near = memory[:, :, : mask.shape[0], :, : mask.shape[1]].unbind()
        mask = mask[:, None, None]

        def mixed(layer: int, queries: Tensor) -> Tensor:
            keys, values = near[layer]
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)

        return mixed

    def _by_products(self, memory: Tensor, mask: Tensor) -> Look:
        """The same; on a CPU, over short rows, in two thirds of the time."""
        seen = mask.repeat_interleave(self.kv_heads, 0)[:, None]
        count, reach = seen.shape[0], mask.shape[1]
        near = memory.flatten(2, 3)[:, :, :count, :reach]
        keys, values = near[:, 0].mT.unbind(), near[:, 1].unbind()
        scale = self.head_dim**-0.5

        def mixed(layer: int, queries: Tensor) -> Tensor:
            asked = queries.reshape(count, -1, self.head_dim)
            shares = torch.baddbmm(seen, asked, keys[layer], alpha=scale).softmax(-1)
            return shares.bmm(values[layer]).view(queries.shape)

        return mixed


def _untouched(size: int, dtype: torch.dtype) -> Tensor:
    """Zeros that take memory page by page as they are written: a row's unused context costs nothing."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    area = mmap.mmap(-1, size, **private)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        area.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(area, dtype=dtype)


def _reach(positions: np.ndarray) -> tuple[int, list[int]]:
    """How far one attention call for all rows looks, and the few rows, if any, that are better done on their own."""
    longest = int(positions.max())
    if (longest - int(positions.min())) * len(positions) <= LONG_ROW:
        return longest + 1, []
    order = np.argsort(-positions)
    lengths = positions[order] + 1
    apart = np.concatenate(([0], np.cumsum(lengths + LONG_ROW)))[:-1]
    count = int(np.argmin(apart + lengths * len(lengths)))
    return int(lengths[count]), order[:count].tolist()
