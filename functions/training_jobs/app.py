"""Training jobs: made, looked at, cancelled, and the events that they tell."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from mangum import Mangum
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from tuneyard import jobs, models, submissions, trials, uploads, views, web
from tuneyard.auth import Caller
from tuneyard.configs import RLConfig, SFTConfig, SFTExperimentalConfig
from tuneyard.records import JobStatus
from tuneyard.settings import settings
from tuneyard.trajectories import TrajectoryGroup

router = APIRouter(prefix="/v1/preview", tags=["Training jobs"])
IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=255)]
Wait = Annotated[
    float | None, Query(ge=0, le=20, description="Hold the answer so long for news, in seconds.")
]


class Body(BaseModel):
    """Management bodies refuse what they do not know."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class CreateRlJob(Body):
    """A reinforcement-learning job."""

    model_id: str
    trajectory_groups: list[TrajectoryGroup] | None = None
    trajectory_groups_url: str | None = None
    experimental_config: RLConfig | None = None
    validate_only: bool = Field(False, description="Check everything and count; queue nothing.")


class CreateSftJob(Body):
    """A supervised fine-tuning job."""

    model_id: str
    training_data_url: str = Field(min_length=1, max_length=8192)
    config: SFTConfig | None = None
    experimental_config: SFTExperimentalConfig | None = None
    validate_only: bool = Field(False, description="Check everything and count; queue nothing.")


@router.post("/training-jobs")
def create_training_job(
    body: CreateRlJob, caller: Caller, idempotency_key: IdempotencyKey = None
) -> dict[str, Any]:
    """Queue a reinforcement-learning job, or tell what it would do."""
    model = models.get(caller, body.model_id)
    draft = submissions.draft_rl(
        caller,
        model,
        groups=body.trajectory_groups,
        groups_url=body.trajectory_groups_url,
        config=models.pin_reference(caller, model, body.experimental_config or RLConfig()),
        key=idempotency_key,
    )
    return trials.run(caller, draft) if body.validate_only else views.job(submissions.create(caller, draft))


@router.post("/sft-training-jobs")
def create_sft_training_job(
    body: CreateSftJob, caller: Caller, idempotency_key: IdempotencyKey = None
) -> dict[str, Any]:
    """Queue a supervised fine-tuning job, or tell what it would do."""
    draft = submissions.draft_sft(
        caller,
        models.get(caller, body.model_id),
        url=body.training_data_url,
        config=body.config or SFTConfig(),
        experimental=body.experimental_config or SFTExperimentalConfig(),
        key=idempotency_key,
    )
    return trials.run(caller, draft) if body.validate_only else views.job(submissions.create(caller, draft))


@router.get("/training-jobs")
def list_training_jobs(
    caller: Caller,
    model_id: str | None = None,
    status: JobStatus | None = None,
    after: web.After = None,
    limit: web.Limit = 20,
    order: web.Order = "asc",
) -> dict[str, Any]:
    """The team's jobs, of one model and status where they are named."""
    rows = jobs.page(
        caller, model_id=model_id, status=status, after=after, limit=limit + 1, descending=order == "desc"
    )
    return web.page(rows, limit, views.job)


@router.get("/training-jobs/{training_job_id}")
def get_training_job(training_job_id: str, caller: Caller) -> dict[str, Any]:
    """One job, of either kind."""
    return views.job(jobs.get(caller, training_job_id))


@router.post("/training-jobs/{training_job_id}/cancel")
def cancel_training_job(training_job_id: str, caller: Caller) -> dict[str, Any]:
    """End a queued job at once, a running one before its next gradient step."""
    return views.job(jobs.cancel(caller, training_job_id))


@router.get("/training-jobs/{training_job_id}/events")
async def list_training_job_events(
    training_job_id: str, caller: Caller, after: web.After = None, limit: web.Limit = 20, wait: Wait = None
) -> dict[str, Any]:
    """The job's events in order; held for a while when there is nothing new and the job goes on."""
    job = await run_in_threadpool(jobs.get, caller, training_job_id)
    seconds = settings().events_hold_seconds if wait is None else wait
    rows = await jobs.wait_for_events(job, after=after, limit=limit + 1, seconds=seconds)
    return web.page(rows, limit, views.event)


@router.post("/uploads")
def create_upload(caller: Caller) -> dict[str, Any]:
    """An address to PUT a file to, and the URL under which a job may name it."""
    return uploads.create(caller)


handler = Mangum(web.create_app("Training jobs", router), lifespan="off")
