"""What a job is going to do, settled before its first step: the same for the same input, whatever machine looks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tuneyard_host.training.packing import Row


@dataclass
class Plan:
    """The steps of a job, and what its owner should know of them."""

    num_sequences: int
    """Gradient steps: packed rows (RL) or batches (SFT)."""
    warnings: dict[str, int]
    """Reason -> how many trajectories or lines were dropped for it; empty when nothing was dropped."""
    num_trained_tokens: int
    ledger: list[dict[str, Any]]
    """One plain row for each trajectory or line."""
    notes: list[str]
    """Plain sentences about what is unusual in this job."""
    rows: list[list[Row]] = field(default_factory=list, repr=False)
    """The packed rows of each step: one for RL, as many as memory asks for in SFT."""
    seed: int = 0


def count(ledger: list[dict[str, Any]]) -> dict[str, int]:
    """How many rows of a ledger were dropped, by reason; and how many only in part."""
    reasons = Counter(row["dropped"] for row in ledger if row["dropped"])
    for row in ledger:
        if not row["dropped"]:
            reasons.update(f"{reason} (part of a trajectory)" for reason in row.get("dropped_histories", ()))
    return dict(reasons)
