"""Memory of a machine: kept rather than given back from step to step, and used twice where a row would not fit."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from tuneyard_host.training.attention import own_attention

SHARE = 0.3
"""How much of the machine's memory a row's activations may take before they are computed twice instead."""


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT = 2**30


def keep_freed() -> None:
    """Let the C library keep up to a GiB that was freed, instead of asking the system for pages anew at every step.

    Where it is not the GNU one, nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _KEPT)
        mallopt(_MMAP_THRESHOLD, _KEPT)


@contextmanager
def sparing(model: Any, tokens: int) -> Iterator[None]:
    """Within this block a forward pass over so many tokens keeps of each layer what it must, and no more."""
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not torch.is_grad_enabled() or activation_bytes(model, tokens) <= SHARE * _memory(model.device):
        yield
        return
    twice = partial(
        checkpoint,
        use_reentrant=False,
        preserve_rng_state=False,  # nothing draws from it: dropout has seeds of its own
        context_fn=lambda: (nullcontext(), own_attention(model)),
    )
    try:
        for layer in layers:
            layer.gradient_checkpointing, layer.training, layer._gradient_checkpointing_func = (
                True,
                True,
                twice,
            )
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = layer.training = False


def activation_bytes(model: Any, tokens: int) -> int:
    """About what the tensors take that one forward pass keeps for its backward pass."""
    config = model.config.get_text_config()
    numbers = config.num_hidden_layers * (16 * config.hidden_size + 5 * config.intermediate_size)
    return int(tokens * numbers * model.dtype.itemsize)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
