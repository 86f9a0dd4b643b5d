"""Runs: the metric history that is made with a model."""

from __future__ import annotations

import json
import statistics
from typing import Any

from tuneyard import blobs, clock, ids, table
from tuneyard.records import Model, Run, RunRow
from tuneyard.trajectories import TrajectoryGroup


def append(run_id: str, metrics: dict[str, float]) -> RunRow:
    """Add a row to a run's history."""
    row = table.count(Run, run_id, attribute="last_row")
    record = RunRow(run_id=run_id, row=row, metrics=metrics, created_at=clock.now_ms())
    table.write(table.Put(record, new=True))
    return record


def log(model: Model, *, split: str, groups: list[TrajectoryGroup]) -> RunRow | None:
    """Keep trajectories and append their summary to the model's run; None when there is nothing to summarise."""
    body = json.dumps([group.model_dump(mode="json") for group in groups], separators=(",", ":"))
    blobs.put_packed(blobs.log_key(model.id, ids.new()), body.encode())
    metrics = {f"{split}/{name}": value for name, value in summary(groups).items()}
    return append(model.run_id, metrics) if metrics else None


def summary(groups: list[TrajectoryGroup]) -> dict[str, float]:
    """Mean reward, mean standard deviation within a group, exception rate, and the mean of every numeric metric."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    exceptions = sum(len(group.exceptions) for group in groups)
    if not trajectories and not exceptions:
        return {}
    result = {"exception_rate": exceptions / (len(trajectories) + exceptions)}
    if not trajectories:
        return result
    result["reward"] = statistics.fmean(t.reward for t in trajectories)
    rewards = [[t.reward for t in group.trajectories] for group in groups if group.trajectories]
    result["reward_std_dev"] = statistics.fmean(statistics.pstdev(values) for values in rewards)
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            if _is_number(value):
                values.setdefault(name, []).append(float(value))
    return result | {name: statistics.fmean(found) for name, found in values.items() if name not in result}


def _is_number(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, int | float) and abs(value) < float("inf"))
