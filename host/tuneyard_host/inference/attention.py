"""What the tokens of some prompts see: made once for a chunk, and used in every layer.

Each token sees what its row holds before it. Segments of about one size are attended to in one call, padded to the
longest of them, as a call costs more than the little arithmetic of a short prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

CALL = 4096
"""What an attention call costs, in pairs of a query and a key that it could look at instead."""


@dataclass(frozen=True)
class Segment:
    """The next tokens of one row's prompt: their keys and values go to ``start`` and on."""

    row: int
    start: int
    tokens: np.ndarray
    """(n,) int32"""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Alone:
    """One segment on its own, for which nothing needs to be padded."""

    def __init__(self, segment: Segment, at: int, device: torch.device) -> None:
        self._row, self._end = segment.row, segment.end
        self._here = slice(at, at + len(segment.tokens))
        self._triangle = segment.start == 0 and segment.end > 1
        self._seen: Tensor | None = None
        if segment.start and len(segment.tokens) > 1:
            places = torch.arange(segment.end, device=device)
            self._seen = places <= places[segment.start :, None]

    def mix(self, held: Tensor, queries: Tensor, mixed: Tensor) -> None:
        """Write to ``mixed`` (T, H, d) what its queries (T, H, d) find in ``held`` (2, N, Hkv, L, d)."""
        groups = queries.shape[1] // held.shape[2]
        keys, values = (held[i, self._row, None, :, : self._end].repeat_interleave(groups, 1) for i in (0, 1))
        asked = queries[None, self._here].transpose(1, 2)
        out = F.scaled_dot_product_attention(
            asked, keys, values, attn_mask=self._seen, is_causal=self._triangle
        )
        mixed[self._here] = out[0].transpose(0, 1)


class Together:
    """Segments of about one size."""

    def __init__(
        self, segments: list[Segment], ats: list[int], groups: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """``groups``: how many query heads share a key head."""
        self._rows = torch.tensor([s.row for s in segments], device=device)
        self._reach = max(s.end for s in segments)
        lengths = np.array([len(s.tokens) for s in segments])
        slots = np.arange(lengths.max())
        real = slots < lengths[:, None]
        places = np.where(real, np.array(ats)[:, None] + slots, ats[0])
        self._places = torch.from_numpy(places.ravel()).to(device)
        self._real = torch.from_numpy(np.flatnonzero(real)).to(device)
        self._targets = torch.from_numpy(places[real]).to(device)
        last = np.array([s.start for s in segments])[:, None] + np.where(real, slots, 0)
        seen = torch.from_numpy(np.arange(self._reach) <= last[:, :, None])
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
        self._slots = len(slots)
        self._mask = mask[:, None].repeat(1, 1, groups, 1).to(device)

    def mix(self, held: Tensor, queries: Tensor, mixed: Tensor) -> None:
        """Write to ``mixed`` (T, H, d) what its queries (T, H, d) find in ``held`` (2, N, Hkv, L, d)."""
        _, heads, size = queries.shape
        count, slots, kv_heads = len(self._rows), self._slots, held.shape[2]
        keys, values = (half[:, :, : self._reach].index_select(0, self._rows) for half in held)
        # The query heads that share a key head stand where other positions would: all see the same keys.
        asked = queries.index_select(0, self._places).view(count, slots, kv_heads, -1, size)
        asked = asked.permute(0, 2, 3, 1, 4).reshape(count, kv_heads, -1, size)
        out = F.scaled_dot_product_attention(asked, keys, values, attn_mask=self._mask)
        out = out.view(count, kv_heads, -1, slots, size).permute(0, 3, 1, 2, 4).reshape(-1, heads, size)
        mixed.index_copy_(0, self._targets, out.index_select(0, self._real))


class Chunk:
    """The segments that are read in one step, one after the other: T tokens."""

    def __init__(
        self, segments: list[Segment], groups: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        ats = np.cumsum([0, *(len(s.tokens) for s in segments)]).tolist()
        self.tokens = torch.from_numpy(np.concatenate([s.tokens for s in segments])).to(device)
        self._spans = np.concatenate([np.arange(s.start, s.end) for s in segments])
        self._rows = np.repeat([s.row for s in segments], [len(s.tokens) for s in segments])
        self.positions = torch.from_numpy(self._spans).to(device)
        self._parts: list[Alone | Together] = [
            Alone(segments[group[0]], ats[group[0]], device)
            if len(group) == 1
            else Together([segments[i] for i in group], [ats[i] for i in group], groups, dtype, device)
            for group in _groups(segments)
        ]

    def lanes(self, kv_heads: int, context: int) -> Tensor:
        """Where the keys of each token go (T, Hkv), in a layer's memory seen as (-1, d)."""
        heads = self._rows[:, None] * kv_heads + np.arange(kv_heads)
        return torch.from_numpy(heads * context + self._spans[:, None]).to(self.tokens.device)

    def mix(self, held: Tensor, queries: Tensor) -> Tensor:
        """What the queries (T, H, d) find in ``held`` (2, N, Hkv, L, d), their own keys among it: (T, H * d)."""
        mixed = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for part in self._parts:
            part.mix(held, queries, mixed)
        return mixed.flatten(1)


def _groups(segments: list[Segment]) -> list[list[int]]:
    """Which segments share a call: each joins the one before it unless padding would cost more than another call."""
    groups: list[list[int]] = []
    slots = reach = 0
    for i in sorted(range(len(segments)), key=lambda i: segments[i].end, reverse=True):
        length, end = len(segments[i].tokens), segments[i].end
        if groups:
            held = len(groups[-1])
            together = (held + 1) * max(slots, length) * reach
            if together <= held * slots * reach + length * end + CALL:
                groups[-1].append(i)
                slots = max(slots, length)
                continue
        groups.append([i])
        slots, reach = length, end
    return groups
