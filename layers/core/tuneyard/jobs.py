"""Training jobs, as their owner sees them: looked at, listed, cancelled. What a worker does is in leases.py."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from aws_lambda_powertools import Logger
from boto3.dynamodb.conditions import Attr, ConditionBase
from starlette.concurrency import run_in_threadpool

from tuneyard import bus, clock, ids, table, usage
from tuneyard.errors import Conflict, Invalid, NotFound
from tuneyard.records import (
    ArtifactEvent,
    EventType,
    Identity,
    Job,
    JobEvent,
    JobStatus,
    Model,
    OpenJob,
)

logger = Logger(service="tuneyard")


def get(caller: Identity, job_id: str) -> Job:
    """The job; NotFound when there is none or it is another team's."""
    job = table.get(Job, job_id)
    if job is None or job.team != caller.team:
        raise NotFound(f"No training job {job_id!r}.")
    return job


def page(
    caller: Identity,
    *,
    model_id: str | None,
    status: JobStatus | None,
    after: str | None,
    limit: int,
    descending: bool,
) -> list[Job]:
    """The team's jobs in order of creation, at most ``limit``, of one model and status where they are named."""
    start = None
    if after is not None:
        start = table.get(Job, after)
        if start is None or start.team != caller.team:
            raise Invalid(
                f"No job has the id {after!r}; send the id of a row of this list as `after`.", param="after"
            )
    only: ConditionBase | None = None if status is None else Attr("status").eq(status.value)
    if model_id is None:
        return table.listed(
            Job, "by_team", caller.team, after=start, limit=limit, descending=descending, only=only
        )
    mine = Attr("team").eq(caller.team)
    only = mine if only is None else only & mine
    return table.listed(Job, "by_model", model_id, after=start, limit=limit, descending=descending, only=only)


def events(job: Job, *, after: str | None, limit: int) -> list[JobEvent]:
    """The job's events in order, at most ``limit``, after the one named."""
    place = None
    if after is not None:
        place = ids.position(job.id, after)
        if not 1 <= place <= job.last_event and table.get(JobEvent, job.id, place) is None:
            raise Invalid(
                f"The job has no event {after!r}; send the id of one of its events as `after`.", param="after"
            )
    return table.children(JobEvent, job.id, after=None if place is None else (place,), limit=limit)


async def wait_for_events(job: Job, *, after: str | None, limit: int, seconds: float) -> list[JobEvent]:
    """The same page, held back at most ``seconds`` while it has nothing to tell and the job may still go on.

    ``training_started`` alone tells nothing: clients ask for it again and again.
    """
    until = time.monotonic() + seconds
    while True:
        found = await run_in_threadpool(events, job, after=after, limit=limit)
        news = any(one.type != "training_started" for one in found)
        if news or job.status.final or time.monotonic() >= until:
            return found
        await asyncio.sleep(min(0.2, max(0.0, until - time.monotonic())))
        job = await run_in_threadpool(_again, job)


def queue_position(job: Job) -> int | None:
    """How many jobs of the same model come before this one while it is queued, else None."""
    if job.status is not JobStatus.QUEUED:
        return None
    ahead = table.children(OpenJob, job.model_id, limit=1000)
    return next((place for place, row in enumerate(ahead) if row.job_id == job.id), None)


def cancel(caller: Identity, job_id: str) -> Job:
    """End a queued job at once and a running one before its next gradient step; a final one is a Conflict."""
    job = get(caller, job_id)
    if job.status is JobStatus.CANCELLED:
        return job
    return _cancel(job, f"cancelled by {caller.user}")


def cancel_all(model: Model, *, reason: str) -> None:
    """End every job of a model that is not final."""
    while rows := table.children(OpenJob, model.id, limit=100):
        for row in rows:
            job = table.get(Job, row.job_id)
            if job is None or job.status.final:
                table.write(table.Delete(OpenJob, (row.model_id, row.created_at, row.job_id)))
            else:
                _cancel(job, reason, final_is_fine=True)


def ending(
    job: Job,
    status: JobStatus,
    *,
    when: Any,
    error: str | None = None,
    events: list[tuple[str, dict[str, Any]]],
    changes: dict[str, Any] | None = None,
    model_changes: dict[str, Any] | None = None,
) -> tuple[list[table.Write], ArtifactEvent]:
    """The writes that end a job, for one transaction: state, last events, its place in the queue, the model's lock."""
    now = clock.now_ms()
    settled = {
        "status": status.value,
        "finished_at": now,
        "error_message": error,
        "lease": None,
        "lease_until": None,
        "last_event": job.last_event + len(events),
    }
    writes: list[table.Write] = [
        table.Update(
            Job,
            (job.id,),
            set=settled | (changes or {}),
            drop="due",
            when=Attr("status").eq(job.status.value) & Attr("last_event").eq(job.last_event) & when,
        ),
        table.Delete(OpenJob, (job.model_id, job.created_at, job.id)),
    ]
    for place, (kind, data) in enumerate(events, start=job.last_event + 1):
        writes.append(table.Put(event(job, place, kind, data), new=True))
    if job.status is JobStatus.RUNNING:
        changed = {"active_job": None} | (model_changes or {})
        writes.append(table.Update(Model, (job.model_id,), set=changed, when=Attr("active_job").eq(job.id)))
        project, model = job.collection.split("/", 1)[1].split("/")[0], f"wandb-artifact:///{job.collection}"
        tokens = (job.num_trained_tokens or 0) if status is JobStatus.SUCCEEDED else 0
        booked = {"training_ms": now - (job.started_at or now), "trained_tokens": tokens}
        writes.append(usage.booking(usage.line(job.team, project, model), **booked))
    told = run_state(job, {JobStatus.SUCCEEDED: "finished"}.get(status, status.value), error)
    writes.append(table.Put(told, new=True))
    return writes, told


def event(job: Job, seq: int, kind: str, data: dict[str, Any]) -> JobEvent:
    """The job's event of this place."""
    return JobEvent(
        id=ids.ordered(job.id, seq), job_id=job.id, seq=seq, type=kind, data=data, created_at=clock.now_ms()
    )


def run_state(job: Job, state: str, error: str | None = None) -> ArtifactEvent:
    """The event that tells the project what became of a job."""
    entity, project, name = job.collection.split("/")
    data = {
        "job_id": job.id,
        "model_id": job.model_id,
        "kind": job.kind.value,
        "state": state,
        "run_name": name,
        "run_user": job.run_user,
    }
    return ArtifactEvent(
        id=ids.ordered(f"{job.id}/{state}", job.last_event),
        type=EventType.RUN_STATE,
        entity=entity,
        project=project,
        author=job.created_by,
        collection=job.collection,
        run_id=job.run_id,
        created_at=clock.now_ms(),
        data=data | ({"error_message": error} if error else {}),
    )


def publish(*happened: ArtifactEvent) -> None:
    """Send events on their way; the sweep sends what could not be sent now, so failing here loses nothing."""
    for one in happened:
        try:
            bus.publish(one)
        except Exception:
            logger.exception("event not published yet; the sweep will do it", event_id=one.id)
            continue
        table.write(table.Update(ArtifactEvent, (one.id,), set={"published_at": clock.now_ms()}, drop="due"))


def _again(job: Job) -> Job:
    """The job as it stands now."""
    return table.get(Job, job.id) or job


def _cancel(job: Job, reason: str, *, final_is_fine: bool = False) -> Job:
    while not job.status.final:
        last = ("training_failed", {"error_message": reason})
        writes, told = ending(job, JobStatus.CANCELLED, when=table.exists(), error=reason, events=[last])
        try:
            table.transact(*writes)
        except table.ConditionFailed:
            job = _again(job)
            continue
        publish(told)
        return _again(job)
    if final_is_fine:
        return job
    raise Conflict(f"Training job {job.id!r} is {job.status} already and cannot be cancelled.")
