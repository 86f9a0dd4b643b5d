"""What a job would do, told over HTTP: the plan that a trainer would make, made without one."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends

from tuneyard.errors import Invalid, TrainingError
from tuneyard.records import Job, JobKind
from tuneyard_host.inference.service import authorised

_LISTED = 1000

router = APIRouter(dependencies=[Depends(authorised)])


@router.post("/v1/plans")
def plan(body: Job) -> dict[str, Any]:
    """The counts of a job whose input is in the bucket, and each trajectory or line that it would drop."""
    try:
        return counts(body)
    except TrainingError as error:
        raise Invalid(str(error)) from error


def counts(job: Job) -> dict[str, Any]:
    """Plan a job as a trainer does; TrainingError where it would fail before its first step."""
    from tuneyard_host import bases  # with torch, which the service does not wait for when it starts
    from tuneyard_host.training import work

    body, base = work.read_input(job), bases.load(work.base_spec(job))
    if job.kind is JobKind.RL:
        config, planned = work.plan_rl(job, body, base)
        work.reference_checkpoint(job, config)
        own = {
            "num_groups": len({row["group"] for row in planned.ledger}),
            "num_trajectories": len(planned.ledger),
        }
    else:
        planned = work.plan_sft(job, body, base)[1]
        own = {"num_lines": len(planned.ledger)}
    left_out = [row for row in planned.ledger if row["dropped"]]
    return own | {
        "num_sequences": planned.num_sequences,
        "num_trained_tokens": planned.num_trained_tokens,
        "dropped": planned.warnings,
        "dropped_rows": [
            {name: row[name] for name in ("group", "index", "line") if name in row}
            | {"reason": row["dropped"]}
            for row in left_out[:_LISTED]
        ],
        "notes": planned.notes,
    }
