"""Runs: the metric history that is made with a model."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

from tuneyard import blobs, clock, ids, table
from tuneyard.errors import Invalid, NotFound
from tuneyard.jobs import publish
from tuneyard.records import ArtifactEvent, Collection, EventType, Identity, Model, Run, RunRow
from tuneyard.trajectories import TrajectoryGroup

_LOOK_BACK = 1000
"""How many rows a metric's last values are looked for in, where not every row has it."""


def find(caller: Identity, entity: str, project: str, run: str) -> Run:
    """The run of this id, or of the model of this name; NotFound when there is none or it is another team's."""
    found = None
    if entity == caller.team:
        collection = table.get(Collection, f"{entity}/{project}/{run}")
        model = table.get(Model, collection.id) if collection and collection.kind == "model" else None
        found = table.get(Run, model.run_id if model else run)
    if found is None or (found.entity, found.project) != (entity, project):
        raise NotFound(f"No run {run!r} in {entity}/{project}.")
    return found


def append(run: Run, metrics: dict[str, float], *, author: str) -> RunRow:
    """Add a row to a run's history, and tell the automations that listen to its metrics."""
    row, told, writes = appending(run, metrics, author=author)
    table.transact(*writes)
    publish(told)
    return row


def appending(
    run: Run, metrics: dict[str, float], *, author: str
) -> tuple[RunRow, ArtifactEvent, list[table.Write]]:
    """The next row of a run's history and its event, and the writes that make both, for a larger transaction.

    The row's number is taken now: a transaction that does not come about leaves it unused.
    """
    number = table.count(Run, run.id, attribute="last_row")
    row = RunRow(run_id=run.id, row=number, metrics=metrics, created_at=clock.now_ms())
    told = event(run, row, author=author)
    return row, told, [table.Put(row, new=True), table.Put(told, new=True)]


def event(run: Run, row: RunRow, *, author: str) -> ArtifactEvent:
    """The event that a run has a new row."""
    return ArtifactEvent(
        id=ids.ordered(f"{run.id}/metrics", row.row),
        type=EventType.RUN_METRIC,
        entity=run.entity,
        project=run.project,
        author=author,
        run_id=run.id,
        data={
            "run_name": run.name,
            "run_user": run.user,
            "model_id": run.model_id,
            "row": row.row,
            "metrics": row.metrics,
        },
        created_at=row.created_at,
    )


def history(run: Run, *, after: str | None, limit: int, descending: bool) -> list[RunRow]:
    """The run's rows in order, at most ``limit``, after the one named."""
    place = None
    if after is not None:
        number = ids.position(run.id, after)
        if table.get(RunRow, run.id, number) is None:
            raise Invalid(
                f"The run has no row {after!r}; send the id of one of its rows as `after`.", param="after"
            )
        place = (number,)
    return table.children(RunRow, run.id, after=place, limit=limit, descending=descending)


def values_before(run_id: str, metric: str, *, row: int, limit: int) -> list[float]:
    """The last values of a metric before a row, the newest first, at most ``limit``, among a thousand rows."""
    found: list[float] = []
    place, looked = row, 0
    while len(found) < limit and looked < _LOOK_BACK:
        rows = table.children(RunRow, run_id, after=(place,), limit=100, descending=True)
        if not rows:
            break
        found += [one.metrics[metric] for one in rows if metric in one.metrics]
        place, looked = rows[-1].row, looked + len(rows)
    return found[:limit]


def log(model: Model, *, split: str, groups: list[TrajectoryGroup], author: str) -> RunRow | None:
    """Keep trajectories and append their summary to the model's run; None when there is nothing to summarise."""
    body = json.dumps([group.model_dump(mode="json") for group in groups], separators=(",", ":"))
    blobs.put_packed(blobs.log_key(model.id, ids.new()), body.encode())
    metrics = {f"{split}/{name}": value for name, value in summary(groups).items()}
    run = table.get(Run, model.run_id)
    return append(run, metrics, author=author) if metrics and run is not None else None


def summary(groups: list[TrajectoryGroup]) -> dict[str, float]:
    """Mean reward, mean standard deviation within a group, exception rate, and the mean of every numeric metric."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    exceptions = sum(len(group.exceptions) for group in groups)
    if not trajectories and not exceptions:
        return {}
    result = {"exception_rate": exceptions / (len(trajectories) + exceptions)}
    if not trajectories:
        return result
    result["reward"] = _mean([t.reward for t in trajectories])
    rewards = [[t.reward for t in group.trajectories] for group in groups if group.trajectories]
    result["reward_std_dev"] = _mean([statistics.pstdev(values) for values in rewards])
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            if _is_number(value):
                values.setdefault(name, []).append(float(value))
    return result | {name: _mean(found) for name, found in values.items() if name not in result}


def _mean(values: list[float]) -> float:
    """The mean, of values too whose sum would be no number any more."""
    return math.fsum(value / len(values) for value in values)


def _is_number(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, int | float) and abs(value) < float("inf"))
