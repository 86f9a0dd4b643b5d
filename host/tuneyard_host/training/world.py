"""The processes that train a job together under torchrun. One process alone, the usual case, is a world of one.

Each computes its share of a step's conversations; gradients are added up, and all take the same optimizer step. So a
world of any size makes the adapter that one process makes, but for rounding.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

_PATIENCE = timedelta(minutes=30)


def join() -> None:
    """Find the others that torchrun started, if there are any: by NCCL on GPUs, by gloo on CPUs."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=_PATIENCE)


def leave() -> None:
    """Part from the others."""
    if dist.is_initialized():
        dist.destroy_process_group()


def size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Which of them this one is; 0 takes the jobs, tells of them and commits."""
    return dist.get_rank() if dist.is_initialized() else 0


def add_up(*tensors: Tensor) -> None:
    """Replace each tensor, in place, by its sum over all processes."""
    if size() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)


def agreed(value: Any) -> Any:
    """What process 0 says: anything that can be pickled."""
    if size() == 1:
        return value
    said = [value]
    dist.broadcast_object_list(said, src=0)
    return said[0]


def shard(model: Any) -> None:
    """Spread the frozen layers of a base model over the processes (FSDP2): each keeps its share of every layer.

    For base models that do not fit one GPU. The adapter, a thousandth of it, stays whole everywhere.
    """
    if size() == 1 or getattr(model, "_tuneyard_sharded", False):
        return
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            fully_shard(layer)
    model._tuneyard_sharded = True
