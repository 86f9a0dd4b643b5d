"""What a job would do, without doing it: every check, the counts, and what it is likely to take."""

from __future__ import annotations

from statistics import median
from typing import Any

import httpx

from tuneyard import blobs, engine, jobs, models, submissions
from tuneyard.errors import Invalid, Unavailable
from tuneyard.records import Identity, Job, JobStatus
from tuneyard.settings import settings
from tuneyard.submissions import Draft

_PLANNED_SECONDS, _LOOKED_AT = 24, 50


def run(caller: Identity, draft: Draft) -> dict[str, Any]:
    """Read the input as a trainer would, and count; nothing is queued and nothing is kept.

    Raises Invalid with the sentence that the job would have failed with.
    """
    last_step = models.get(caller, draft.job.model_id).last_step
    job = draft.job.model_copy(
        update={"input_key": blobs.trial_key(draft.job.id), "parent_step": last_step or None}
    )
    submissions.take_in(caller, draft, job.input_key)
    try:
        plan = _planned(job)
    finally:
        blobs.delete_prefix(job.input_key)
    return {
        "object": "training_job.validation",
        "valid": True,
        "kind": job.kind,
        "model_id": job.model_id,
        **plan,
        **_estimate(caller, job, plan["num_trained_tokens"]),
    }


def _planned(job: Job) -> dict[str, Any]:
    """The plan of the program that has the base model's tokenizer and template at hand."""
    url, headers = engine.operation("/v1/plans")
    try:
        answer = httpx.post(
            url, content=job.model_dump_json(), headers=headers, timeout=_PLANNED_SECONDS, trust_env=False
        )
    except httpx.TimeoutException as error:
        raise Invalid(
            f"The data could not be looked through within {_PLANNED_SECONDS} seconds. Send it without validate_only: a "
            "job checks the same before it trains.",
            param="validate_only",
        ) from error
    except httpx.TransportError as error:
        raise engine.silent() from error
    if answer.status_code == Invalid.status:
        raise Invalid(answer.json()["error"]["message"])
    if not answer.is_success:
        raise Unavailable("The inference service could not plan the job. Try again.", retry_after=5)
    plan: dict[str, Any] = answer.json()
    return plan


def _estimate(caller: Identity, job: Job, tokens: int) -> dict[str, Any]:
    """Seconds at the median speed of the team's last jobs of this kind on this base model, and their price."""
    rows = jobs.page(
        caller, model_id=None, status=JobStatus.SUCCEEDED, after=None, limit=_LOOKED_AT, descending=True
    )
    speeds = [
        row.num_trained_tokens * 1000 / max(1, (row.finished_at or 0) - row.started_at)
        for row in rows
        if (row.base_model, row.kind) == (job.base_model, job.kind)
        and row.num_trained_tokens
        and row.started_at
    ]
    seconds = tokens / median(speeds) if speeds else None
    cost = None if seconds is None else round(seconds / 3600 * settings().worker_hour_price, 6)
    return {
        "estimated_seconds": None if seconds is None else round(seconds, 3),
        "estimated_cost": cost,
        "estimated_from_jobs": len(speeds),
    }
