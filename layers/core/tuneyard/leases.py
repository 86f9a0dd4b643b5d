"""Training jobs, as a worker sees them: claimed under a lease, reported on, and ended exactly once.

A lease is a token that only its holder knows. Each write of a worker is conditional on its token, so a worker that
was taken for dead and comes back can change nothing.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

from boto3.dynamodb.conditions import Attr, ConditionBase

from tuneyard import blobs, checkpoints, clock, ids, queues, runs, table
from tuneyard.jobs import ending, event, publish, run_state
from tuneyard.records import (
    ArtifactEvent,
    Checkpoint,
    CheckpointFile,
    EventType,
    Job,
    JobStatus,
    Model,
    OpenJob,
    Run,
)
from tuneyard.settings import settings

MOST_DEATHS = 3


class Lost(Exception):
    """The job is no longer this worker's: it was cancelled, or its lease ran out and another took over."""


class NotYet(Exception):
    """The job may not run now: it is running elsewhere, or an earlier job of its model is not final."""


def claim(job_id: str, *, worker: str) -> Job | None:
    """Take a job: queued, or running under a lease that ran out or that is this very worker's from an earlier life.

    None when the job is gone or final. NotYet while an earlier job of its model is open or somebody else runs it.
    """
    job = table.get(Job, job_id)
    if job is None or job.status.final:
        return None
    now = clock.now_ms()
    first = table.children(OpenJob, job.model_id, limit=1)
    if first and first[0].job_id != job.id:
        raise NotYet(first[0].job_id)
    if job.status is JobStatus.RUNNING and job.worker != worker and (job.lease_until or 0) > now:
        raise NotYet(job.id)
    died = job.status is JobStatus.RUNNING
    if died and job.deaths + 1 >= MOST_DEATHS:
        _end_as_deadly(job)
        return None
    lease = secrets.token_hex(16)
    changes: dict[str, Any] = {
        "status": JobStatus.RUNNING.value,
        "lease": lease,
        "worker": worker,
        "lease_until": now + round(settings().lease_seconds * 1000),
    }
    if job.started_at is None:
        newest = _latest(job.model_id)
        changes |= {"started_at": now, "parent_step": newest.step if newest else 0}
    told = run_state(job, "running")
    writes: list[table.Write] = [
        table.Update(Job, (job.id,), set=changes, add={"deaths": 1} if died else {}, when=_as_read(job)),
        table.Update(
            Model,
            (job.model_id,),
            set={"active_job": job.id},
            when=Attr("active_job").not_exists() | Attr("active_job").eq(job.id),
        ),
    ]
    if job.started_at is None:
        writes.append(table.Put(told, new=True))
    try:
        table.transact(*writes)
    except table.ConditionFailed as error:
        raise NotYet(job.id) from error
    if job.started_at is None:
        publish(told)
    return table.get(Job, job.id)


def renew(job: Job) -> None:
    """Keep the lease for another ``lease_seconds``; Lost when it is no longer ours."""
    until = clock.now_ms() + round(settings().lease_seconds * 1000)
    _write(table.Update(Job, (job.id,), set={"lease_until": until}, when=_held(job)))


def report(job: Job, kind: str, data: dict[str, Any], **changes: Any) -> Job:
    """Append the worker's next event, and return the job as it is then; Lost when the job is no longer ours.

    The job row counts the worker's events, so a resumed worker knows how many of them are written already. A gradient
    step becomes a row of the model's run in the same transaction.
    """
    seq = job.last_event + 1
    changed = {"last_event": seq, "progress": job.progress + 1, "deaths": 0} | changes
    happened, more = _row(job, kind, data) if kind == "gradient_step" else ([], [])
    _write(
        table.Update(Job, (job.id,), set=changed, when=_held(job) & Attr("last_event").eq(job.last_event)),
        table.Put(event(job, seq, kind, data), new=True),
        *more,
    )
    publish(*happened)
    return job.model_copy(update=changed)


def commit(
    job: Job, *, step: int, files: Mapping[str, bytes], metrics: dict[str, float], lineage: dict[str, Any]
) -> Checkpoint:
    """Make the checkpoint: its files first, then one transaction for everything that says that it is there.

    Raises Lost when the job is no longer ours; then nothing of it can be seen.
    """
    prefix = blobs.checkpoint_prefix(job.model_id, step, job.id)
    for name, body in files.items():
        blobs.put(prefix + name, body)
    now = clock.now_ms()
    checkpoint = Checkpoint(
        id=ids.ordered(job.model_id, step),
        model_id=job.model_id,
        step=step,
        job_id=job.id,
        kind=job.kind,
        prefix=prefix,
        metrics=metrics,
        lineage=lineage,
        created_at=now,
        files=[
            CheckpointFile(name=name, size=len(body), sha256=hashlib.sha256(body).hexdigest())
            for name, body in files.items()
        ],
    )
    end = ("training_ended", {"step": step, "checkpoint_id": checkpoint.id})
    writes, told = ending(
        job,
        JobStatus.SUCCEEDED,
        when=_held(job),
        events=[end],
        changes={"checkpoint_step": step},
        model_changes={"last_step": step},
    )
    happened = [told, *(_alias_added(job, checkpoint, alias) for alias in (f"step{step}", "latest"))]
    writes += [table.Put(checkpoint, new=True), *(table.Put(one, new=True) for one in happened[1:])]
    result, more = _row(job, "train", metrics | {"step": float(step)}) if metrics else ([], [])
    _write(*writes, *more)
    publish(*happened, *result)
    return checkpoint


def release(job: Job) -> None:
    """Give a job back that this worker cannot finish because it is told to stop; another goes on with it."""
    now = clock.now_ms()
    changes = {"status": JobStatus.QUEUED.value, "lease": None, "lease_until": None, "rung_at": now}
    _write(table.Update(Job, (job.id,), set=changes, when=_held(job)))
    queues.send_job(job.id, model_id=job.model_id, ring=now)


def fail(job: Job, reason: str) -> None:
    """End the job as failed with a sentence that says what to do; Lost when it is no longer ours."""
    last = ("training_failed", {"error_message": reason})
    writes, told = ending(job, JobStatus.FAILED, when=_held(job), error=reason, events=[last])
    _write(*writes)
    publish(told)


def left_behind(worker: str) -> list[Job]:
    """The jobs that a worker of this name was running when it ended, for the next one of that name."""
    running = Attr("status").eq(JobStatus.RUNNING.value) & Attr("worker").eq(worker)
    return table.listed(Job, "due", "", limit=100, only=running)


class Swept(NamedTuple):
    """What a sweep has seen: how many models have a job that is not final, and how many workers were gone."""

    models_at_work: int
    leases_expired: int


def sweep() -> Swept:
    """Ring for queued jobs whose message may be lost, and take jobs back from workers that are gone.

    Runs every minute or oftener; two sweeps at once do no harm.
    """
    now = clock.now_ms()
    open_jobs = list(table.listed(Job, "due", "", limit=10_000))
    expired = 0
    for job in open_jobs:
        if job.status is JobStatus.QUEUED and now - (job.rung_at or job.created_at) > _RING_AFTER_MS:
            _ring(job, now)
        elif job.status is JobStatus.RUNNING and (job.lease_until or 0) < now:
            _take_back(job, now)
            expired += 1
    return Swept(len({job.model_id for job in open_jobs}), expired)


_RING_AFTER_MS = 60_000


def _ring(job: Job, now: int) -> None:
    """Send the job's message again; a message too many is harmless, since a claim is conditional."""
    try:
        table.write(
            table.Update(Job, (job.id,), set={"rung_at": now}, when=Attr("status").eq(JobStatus.QUEUED.value))
        )
    except table.ConditionFailed:
        return
    queues.send_job(job.id, model_id=job.model_id, ring=now)


def _take_back(job: Job, now: int) -> None:
    """Queue a job again whose worker let its lease run out, or end it when it has killed too many."""
    if job.deaths + 1 >= MOST_DEATHS:
        _end_as_deadly(job)
        return
    seq = job.last_event + 1
    changes = {
        "status": JobStatus.QUEUED.value,
        "lease": None,
        "lease_until": None,
        "last_event": seq,
        "rung_at": now,
    }
    told = {"reason": f"the worker {job.worker} stopped answering"}
    try:
        table.transact(
            table.Update(Job, (job.id,), set=changes, add={"deaths": 1}, when=_as_read(job)),
            table.Put(event(job, seq, "job_requeued", told), new=True),
        )
    except table.ConditionFailed:
        return
    queues.send_job(job.id, model_id=job.model_id, ring=now)


def _end_as_deadly(job: Job) -> None:
    reason = (
        f"The job ended {MOST_DEATHS} workers in a row without getting further, at event {job.last_event}. It may need "
        "more memory than a worker has: send fewer or shorter trajectories, or a smaller packed_sequence_length."
    )
    last = ("training_failed", {"error_message": reason})
    writes, told = ending(job, JobStatus.FAILED, when=_as_read(job), error=reason, events=[last])
    try:
        table.transact(*writes)
    except table.ConditionFailed:
        return
    publish(told)


def _alias_added(job: Job, checkpoint: Checkpoint, alias: str) -> ArtifactEvent:
    entity, project, _ = job.collection.split("/")
    return ArtifactEvent(
        id=ids.ordered(f"{job.id}/{alias}", checkpoint.step),
        type=EventType.ADD_ARTIFACT_ALIAS,
        entity=entity,
        project=project,
        author=job.created_by,
        collection=job.collection,
        version=checkpoint.step,
        version_name=f"step{checkpoint.step}",
        metadata=checkpoints.metadata(checkpoint),
        alias=alias,
        created_at=clock.now_ms(),
        data={"model_id": job.model_id, "job_id": job.id},
    )


def _row(job: Job, prefix: str, metrics: dict[str, Any]) -> tuple[list[ArtifactEvent], list[table.Write]]:
    """The event and the writes of the next row of the job's run; none when there is nothing to tell, or no run."""
    run = table.get(Run, job.run_id) if metrics else None
    if run is None:
        return [], []
    named = {f"{prefix}/{name}": float(value) for name, value in metrics.items()}
    _, told, writes = runs.appending(run, named, author=job.created_by)
    return [told], writes


def _latest(model_id: str) -> Checkpoint | None:
    return next(iter(table.children(Checkpoint, model_id, limit=1, descending=True)), None)


def _held(job: Job) -> ConditionBase:
    return Attr("lease").eq(job.lease) & Attr("status").eq(JobStatus.RUNNING.value)


def _as_read(job: Job) -> ConditionBase:
    """The job has not changed hands since it was read."""
    lease = Attr("lease").not_exists() if job.lease is None else Attr("lease").eq(job.lease)
    until = (
        Attr("lease_until").not_exists()
        if job.lease_until is None
        else Attr("lease_until").eq(job.lease_until)
    )
    return Attr("status").eq(job.status.value) & lease & until & Attr("last_event").eq(job.last_event)


def _write(*changes: table.Write) -> None:
    try:
        table.transact(*changes)
    except table.ConditionFailed as error:
        raise Lost from error
