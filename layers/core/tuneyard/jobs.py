"""Training jobs, as their owner sees them: made, looked at, listed, cancelled. What a worker does is in leases.py."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from typing import Any, NamedTuple

from boto3.dynamodb.conditions import Attr
from pydantic import TypeAdapter
from starlette.concurrency import run_in_threadpool

from tuneyard import blobs, bus, clock, ids, queues, table
from tuneyard.configs import RLConfig, SFTConfig, SFTExperimentalConfig
from tuneyard.errors import Conflict, Invalid, NotFound
from tuneyard.records import (
    ArtifactEvent, Idempotency, Identity, Job, JobEvent, JobKind, JobStatus, Model, OpenJob,
)  # fmt: skip
from tuneyard.trajectories import TrajectoryGroup

_GROUPS = TypeAdapter(list[TrajectoryGroup])
_REMEMBERED_SECONDS = 600
_KEPT_SECONDS = 24 * 3600


class Repeat(NamedTuple):
    """What tells a repeated request from a new one: the client's key, if it sent one, and a digest of the body."""

    key: str | None
    body_hash: str


def create_rl(
    caller: Identity, model: Model, *, groups: list[TrajectoryGroup] | None, groups_url: str | None, config: RLConfig,
    key: str | None,
) -> Job:  # fmt: skip
    """Queue a reinforcement-learning job on these trajectory groups, or on those that were uploaded."""
    if (groups is None) == (groups_url is None):
        raise Invalid("Send either trajectory_groups or trajectory_groups_url.", param="trajectory_groups")
    _check_supported(config)
    settled = config.model_dump(mode="json")
    body = b"" if groups is None else _GROUPS.dump_json(groups)
    job = _new(caller, model, JobKind.RL, config={}, experimental=settled, url=groups_url)
    repeat = Repeat(key, _digest(model.id, body, groups_url, settled))
    return _create(caller, job, repeat, body=None if groups is None else b'{"trajectory_groups":' + body + b"}")


def create_sft(
    caller: Identity, model: Model, *, url: str, config: SFTConfig, experimental: SFTExperimentalConfig, key: str | None
) -> Job:
    """Queue a supervised fine-tuning job on an uploaded file of conversations."""
    settled, extra = config.model_dump(mode="json"), experimental.model_dump(mode="json")
    job = _new(caller, model, JobKind.SFT, config=settled, experimental=extra, url=url)
    return _create(caller, job, Repeat(key, _digest(model.id, b"", url, [settled, extra])), body=None)


def get(caller: Identity, job_id: str) -> Job:
    """The job; NotFound when there is none or it is another team's."""
    job = table.get(Job, job_id)
    if job is None or job.team != caller.team:
        raise NotFound(f"No training job {job_id!r}.")
    return job


def page(
    caller: Identity, *, model_id: str | None, status: JobStatus | None, after: str | None, limit: int, descending: bool
) -> list[Job]:
    """The team's jobs in order of creation, at most ``limit``, of one model and status where they are named."""
    start = None
    if after is not None:
        start = table.get(Job, after)
        if start is None or start.team != caller.team:
            raise Invalid(f"No job has the id {after!r}; send the id of a row of this list as `after`.", param="after")
    only = None if status is None else Attr("status").eq(status.value)
    if model_id is None:
        return table.listed(Job, "by_team", caller.team, after=start, limit=limit, descending=descending, only=only)
    mine = Attr("team").eq(caller.team)
    only = mine if only is None else only & mine
    return table.listed(Job, "by_model", model_id, after=start, limit=limit, descending=descending, only=only)


def events(job: Job, *, after: str | None, limit: int) -> list[JobEvent]:
    """The job's events in order, at most ``limit``, after the one named."""
    place = None
    if after is not None:
        place = ids.position(job.id, after)
        if not 1 <= place <= job.last_event and table.get(JobEvent, job.id, place) is None:
            raise Invalid(f"The job has no event {after!r}; send the id of one of its events as `after`.", param="after")
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
        job = await run_in_threadpool(table.get, Job, job.id) or job


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
    job: Job, status: JobStatus, *, when: Any, error: str | None = None, events: list[tuple[str, dict[str, Any]]],
    changes: dict[str, Any] | None = None, model_changes: dict[str, Any] | None = None,
) -> tuple[list[table.Write], ArtifactEvent]:  # fmt: skip
    """The writes that end a job, for one transaction: state, last events, its place in the queue, the model's lock."""
    now = clock.now_ms()
    settled = {
        "status": status.value, "finished_at": now, "error_message": error, "lease": None, "lease_until": None,
        "last_event": job.last_event + len(events),
    }  # fmt: skip
    writes: list[table.Write] = [
        table.Update(
            Job, (job.id,), set=settled | (changes or {}), drop="due",
            when=Attr("status").eq(job.status.value) & Attr("last_event").eq(job.last_event) & when,
        ),
        table.Delete(OpenJob, (job.model_id, job.created_at, job.id)),
    ]  # fmt: skip
    for place, (kind, data) in enumerate(events, start=job.last_event + 1):
        writes.append(table.Put(event(job, place, kind, data), new=True))
    if job.status is JobStatus.RUNNING:
        changed = {"active_job": None} | (model_changes or {})
        writes.append(table.Update(Model, (job.model_id,), set=changed, when=Attr("active_job").eq(job.id)))
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
    entity, project, _ = job.collection.split("/")
    data = {"job_id": job.id, "model_id": job.model_id, "kind": job.kind.value, "state": state}
    return ArtifactEvent(
        id=ids.ordered(f"{job.id}/{state}", job.last_event), type="RUN_STATE", entity=entity, project=project,
        author=job.created_by, collection=job.collection, created_at=clock.now_ms(),
        data=data | ({"error_message": error} if error else {}),
    )  # fmt: skip


def publish(*happened: ArtifactEvent) -> None:
    """Send events on their way; the sweep sends what could not be sent now, so failing here loses nothing."""
    for one in happened:
        try:
            bus.publish(one)
        except Exception:  # noqa: BLE001, S112  the row stays due, and the sweep publishes it
            continue
        table.write(table.Update(ArtifactEvent, (one.id,), set={"published_at": clock.now_ms()}, drop="due"))


def _cancel(job: Job, reason: str, *, final_is_fine: bool = False) -> Job:
    while not job.status.final:
        last = ("training_failed", {"error_message": reason})
        writes, told = ending(job, JobStatus.CANCELLED, when=table.exists(), error=reason, events=[last])
        try:
            table.transact(*writes)
        except table.ConditionFailed:
            job = table.get(Job, job.id) or job
            continue
        publish(told)
        return table.get(Job, job.id) or job
    if final_is_fine:
        return job
    raise Conflict(f"Training job {job.id!r} is {job.status} already and cannot be cancelled.")


def _new(
    caller: Identity, model: Model, kind: JobKind, *, config: dict[str, Any], experimental: dict[str, Any], url: str | None
) -> Job:
    job_id = ids.new()
    return Job(
        id=job_id, team=caller.team, model_id=model.id, collection=model.collection, base_model=model.base_model,
        kind=kind, status=JobStatus.QUEUED, config=config, experimental_config=experimental,
        input_key=blobs.input_key(job_id), training_data_url=url, created_at=clock.now_ms(), created_by=caller.user,
    )  # fmt: skip


def _create(caller: Identity, job: Job, repeat: Repeat, *, body: bytes | None) -> Job:
    """Store the input, record the job, then queue it: a queued job always has something to read.

    A job whose message could not be sent stays queued, and the sweep rings for it.
    """
    slot = hashlib.sha256(f"{'key' if repeat.key else 'auto'}:{repeat.key or repeat.body_hash}".encode()).hexdigest()
    if (first := _first_of(caller, slot, repeat)) is not None:
        return first
    if body is not None:
        blobs.put_packed(job.input_key, body)
    else:
        blobs.copy(_uploaded(caller, job.training_data_url or ""), job.input_key)
    seconds = clock.now_ms() // 1000
    remembered = Idempotency(
        team=caller.team, hash=slot, body_hash=repeat.body_hash, job_id=job.id,
        expires=seconds + (_KEPT_SECONDS if repeat.key else _REMEMBERED_SECONDS),
    )  # fmt: skip
    taken = table.get(Idempotency, caller.team, slot)
    free = Attr("pk").not_exists() if taken is None else Attr("job_id").eq(taken.job_id)
    try:
        table.transact(
            table.Put(job, new=True),
            table.Put(OpenJob(model_id=job.model_id, created_at=job.created_at, job_id=job.id), new=True),
            table.Check(Model, (job.model_id,), when=table.exists() & Attr("deleted_at").not_exists()),
            table.Put(remembered, when=free),
        )
    except table.ConditionFailed as error:
        if 2 in error.failed:
            raise NotFound(f"No model {job.model_id!r}.") from error
        if (first := _first_of(caller, slot, repeat)) is not None:
            return first
        raise
    queues.send_job(job.id, model_id=job.model_id)
    return job


def _first_of(caller: Identity, slot: str, repeat: Repeat) -> Job | None:
    """The job that the same request made before, or None when this one is the first."""
    taken = table.get(Idempotency, caller.team, slot)
    if taken is None or taken.expires <= clock.now_ms() // 1000:
        return None
    if taken.body_hash != repeat.body_hash:
        raise Conflict(
            "This Idempotency-Key was used with another request. Send a new key, or the same request.",
            param="Idempotency-Key",
        )
    job = table.get(Job, taken.job_id)
    if job is None or (repeat.key is None and job.status.final):
        return None
    return job


def _uploaded(caller: Identity, url: str) -> str:
    """The key of an uploaded object that this caller may train on."""
    scheme, _, rest = url.partition("://")
    if scheme == "upload" and ids.is_uuid(rest):
        key = blobs.upload_key(caller.team, rest)
    elif scheme == "s3" and rest.startswith(blobs.uri(blobs.upload_key(caller.team, "")).removeprefix("s3://")):
        key = rest.partition("/")[2]
    elif scheme in ("https", "wandb-artifact"):
        raise Invalid(f"{scheme}:// is not supported yet: upload the file by POST /v1/preview/uploads.", param="url")
    else:
        raise Invalid(f"{url[:200]!r} is not a URL to train on: upload the file by POST /v1/preview/uploads.", param="url")
    if blobs.size(key) is None:
        raise NotFound(f"Nothing was uploaded to {url!r} yet. PUT the file to its upload_url first.")
    return key


def _check_supported(config: RLConfig) -> None:
    if config.scale_learning_rate_by_reward_std_dev:
        raise Invalid(
            "scale_learning_rate_by_reward_std_dev is not supported. Leave it out, or scale learning_rate yourself.",
            param="experimental_config.scale_learning_rate_by_reward_std_dev",
        )


def _digest(*parts: Any) -> str:
    whole = hashlib.sha256()
    for part in parts:
        piece = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True).encode()
        whole.update(hashlib.sha256(piece).digest())
    return whole.hexdigest()
