"""How a token is drawn from the logits, for a whole batch at once.

Randomness is a function of (seed, choice, position) alone: the same request gives the same answer whatever else is in
the batch, in whichever row it runs.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .grammars import Grammar

KNOBS = np.dtype(
    [
        ("greedy", "?"), ("cut", "?"), ("temperature", "f4"), ("top_p", "f4"), ("top_k", "i4"), ("min_p", "f4"),
        ("key", "u8"), ("drawn", "u8"),
    ]
)  # fmt: skip
"""One row's settings; ``cut`` where unlikely tokens are left out, ``drawn`` the number of tokens it has."""

CUTS = ("top_k", "top_p", "min_p")

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


@dataclass
class Sampling:
    """What a client asked of one choice."""

    most: int
    ends: frozenset[int] = frozenset()
    """Tokens that end the turn."""
    least: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    key: int = 0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: dict[int, float] = field(default_factory=dict)
    allowed: list[int] | None = None
    grammar: Grammar | None = None
    logprobs: int | None = None
    """None for none, else how many alternatives to report with each token."""
    prompt_logprobs: int | None = None

    def ends_at(self, token: int, count: int) -> bool:
        """Whether this token ends the turn when it is the ``count``-th."""
        return token in self.ends and count > self.least

    def knobs(self) -> tuple[bool, bool, float, float, int, float, int, int]:
        """Its row of KNOBS."""
        greedy = self.temperature == 0
        cut = not greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)
        return (greedy, cut, self.temperature or 1, self.top_p, self.top_k, self.min_p, self.key, 0)

    @property
    def shaped(self) -> bool:
        """Whether its logits are changed before drawing."""
        penalised = self.presence != 0 or self.frequency != 0 or self.repetition != 1
        limited = self.allowed is not None or self.grammar is not None
        return bool(penalised or limited or self.bias or self.least)


def key(seed: int | None, choice: int) -> int:
    """The random key of one choice: derived from the request's seed, or new."""
    return secrets.randbits(64) if seed is None else _mix(_mix(seed & _MASK) + choice * _STEP)


def _mix(x: int) -> int:
    """The finaliser of splitmix64."""
    x &= _MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def uniform(keys: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each row, from its key and how many it drew before: splitmix64 as a counter."""
    x = keys + (drawn + np.uint64(1)) * np.uint64(_STEP)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return np.asarray((x >> np.uint64(11)) * 2.0**-53)


def draw(logits: Tensor, knobs: np.ndarray) -> Tensor:
    """One token (B,) for each row of logits (B, V): the inverse of the distribution's cumulative sum."""
    greedy = knobs["greedy"]
    if greedy.all():
        return _argmax(logits)
    temperature, device = knobs["temperature"], logits.device
    cooled = logits
    if (temperature != 1).any():
        cooled = logits / torch.from_numpy(temperature.copy()).to(device)[:, None]
    probs = cooled.softmax(-1)
    if knobs["cut"].any():
        rows = torch.from_numpy(np.flatnonzero(knobs["cut"])).to(device)
        probs[rows] = _nucleus(probs[rows], knobs[knobs["cut"]])
    sums = probs.cumsum(-1)
    share = torch.from_numpy(uniform(knobs["key"], knobs["drawn"])).to(device, torch.float32)[:, None]
    picks = torch.searchsorted(sums, share * (1 - 1e-6) * sums[:, -1:], right=True)[:, 0]
    picks = picks.clamp_(max=logits.shape[-1] - 1)  # past the end where a row is not finite
    if greedy.any():
        picks = torch.where(torch.from_numpy(greedy.copy()).to(device), _argmax(logits), picks)
    return picks


def _argmax(logits: Tensor) -> Tensor:
    """numpy's, where it can be had: it is seven times faster."""
    return torch.from_numpy(logits.numpy().argmax(-1)) if logits.device.type == "cpu" else logits.argmax(-1)


def _nucleus(probs: Tensor, knobs: np.ndarray) -> Tensor:
    """Keep the top_k likeliest, of these the fewest that hold top_p of the mass, of these those above min_p.

    What is kept is found as a least probability, so equals of the last one kept stay in too.
    """
    if probs.device.type == "cpu":  # numpy sorts ten times faster than torch there
        ordered = torch.from_numpy(np.sort(probs.numpy())[:, ::-1].copy())
    else:
        ordered = probs.sort(-1, descending=True).values
    size = probs.shape[-1]
    k, top_p, min_p = (torch.from_numpy(knobs[name].copy()).to(probs.device)[:, None] for name in CUTS)
    k = torch.where(k > 0, k, size)
    likeliest = ordered * (torch.arange(size, device=probs.device) < k)
    sums = likeliest.cumsum(-1)
    enough = (sums - likeliest < top_p * sums[:, -1:]) & (likeliest >= min_p * ordered[:, :1])
    least = ordered.gather(1, enough.sum(-1, keepdim=True) - 1)
    return torch.where(probs >= least, probs, 0)
