"""How a job comes to be: its input stored, its row written, its message sent. The same request makes one job."""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

from boto3.dynamodb.conditions import Attr
from pydantic import TypeAdapter

from tuneyard import artifacts, blobs, clock, ids, outbound, queues, table
from tuneyard.configs import UNSUPPORTED, RLConfig, SFTConfig, SFTExperimentalConfig
from tuneyard.errors import Conflict, Invalid, NotFound
from tuneyard.records import Idempotency, Identity, Job, JobKind, JobStatus, Model, OpenJob
from tuneyard.settings import settings
from tuneyard.trajectories import TrajectoryGroup

_GROUPS = TypeAdapter(list[TrajectoryGroup])
_REMEMBERED_SECONDS = 600
_KEPT_SECONDS = 24 * 3600


class Draft(NamedTuple):
    """A job that was asked for, before anything of it is stored."""

    job: Job
    body: bytes | None
    """The input that came with the request; None when the job names a URL."""
    repeat: Repeat


class Repeat(NamedTuple):
    """What tells a repeated request from a new one: the client's key, if it sent one, and a digest of the body."""

    key: str | None
    body_hash: str


def draft_rl(
    caller: Identity,
    model: Model,
    *,
    groups: list[TrajectoryGroup] | None,
    groups_url: str | None,
    config: RLConfig,
    key: str | None = None,
) -> Draft:
    """A reinforcement-learning job on these trajectory groups, or on those that were uploaded."""
    if (groups is None) == (groups_url is None):
        raise Invalid("Send either trajectory_groups or trajectory_groups_url.", param="trajectory_groups")
    _check_supported(config)
    settled = config.model_dump(mode="json")
    body = b"" if groups is None else _GROUPS.dump_json(groups)
    return Draft(
        _new(caller, model, JobKind.RL, config={}, experimental=settled, url=groups_url),
        None if groups is None else b'{"trajectory_groups":' + body + b"}",
        Repeat(key, _digest(model.id, body, groups_url, settled)),
    )


def draft_sft(
    caller: Identity,
    model: Model,
    *,
    url: str,
    config: SFTConfig,
    experimental: SFTExperimentalConfig,
    key: str | None = None,
) -> Draft:
    """A supervised fine-tuning job on a file of conversations."""
    settled, extra = config.model_dump(mode="json"), experimental.model_dump(mode="json")
    job = _new(caller, model, JobKind.SFT, config=settled, experimental=extra, url=url)
    return Draft(job, None, Repeat(key, _digest(model.id, b"", url, [settled, extra])))


def _new(
    caller: Identity,
    model: Model,
    kind: JobKind,
    *,
    config: dict[str, Any],
    experimental: dict[str, Any],
    url: str | None,
) -> Job:
    job_id = ids.new()
    return Job(
        id=job_id,
        team=caller.team,
        model_id=model.id,
        run_id=model.run_id,
        run_user=model.created_by,
        collection=model.collection,
        base_model=model.base_model,
        kind=kind,
        status=JobStatus.QUEUED,
        config=config,
        experimental_config=experimental,
        input_key=blobs.input_key(job_id),
        training_data_url=url,
        created_at=clock.now_ms(),
        created_by=caller.user,
    )


def create(caller: Identity, draft: Draft) -> Job:
    """Store the input, record the job, then queue it: a queued job always has something to read.

    A job whose message could not be sent stays queued, and the sweep rings for it.
    """
    job, repeat = draft.job, draft.repeat
    slot = hashlib.sha256(
        f"{'key' if repeat.key else 'auto'}:{repeat.key or repeat.body_hash}".encode()
    ).hexdigest()
    if (first := _first_of(caller, slot, repeat)) is not None:
        return first
    take_in(caller, draft, job.input_key)
    seconds = clock.now_ms() // 1000
    remembered = Idempotency(
        team=caller.team,
        hash=slot,
        body_hash=repeat.body_hash,
        job_id=job.id,
        expires=seconds + (_KEPT_SECONDS if repeat.key else _REMEMBERED_SECONDS),
    )
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


def take_in(caller: Identity, draft: Draft, key: str) -> None:
    """Have the input where it will be read: what the client names may change or vanish before the job runs."""
    url = draft.job.training_data_url or ""
    scheme, _, rest = url.partition("://")
    if draft.body is not None:
        blobs.put_packed(key, draft.body)
    elif scheme in ("https", "http"):
        most = settings().max_download_bytes
        try:
            body = outbound.download(url, most_bytes=most, seconds=settings().download_seconds)
        except outbound.Failed as error:
            raise Invalid(
                f"The training data could not be fetched: {error} A large file can be uploaded instead: "
                "POST /v1/preview/uploads.",
                param="training_data_url",
            ) from error
        blobs.put(key, body)
    elif scheme == "wandb-artifact":
        blobs.copy(artifacts.training_file(caller, rest.removeprefix("/")), key)
    else:
        blobs.copy(_uploaded(caller, url), key)


def _uploaded(caller: Identity, url: str) -> str:
    """The key of an uploaded object that this caller may train on."""
    key = blobs.uploaded_key(caller.team, url)
    if key is None:
        raise Invalid(
            f"{url[:200]!r} is not a URL to train on: upload the file by POST /v1/preview/uploads.",
            param="url",
        )
    if blobs.size(key) is None:
        raise NotFound(f"Nothing was uploaded to {url!r} yet. PUT the file to its upload_url first.")
    return key


def _check_supported(config: RLConfig) -> None:
    for name, sentence in UNSUPPORTED.items():
        if getattr(config, name) != RLConfig.model_fields[name].default:
            raise Invalid(sentence, param=f"experimental_config.{name}")


def _digest(*parts: Any) -> str:
    whole = hashlib.sha256()
    for part in parts:
        piece = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True).encode()
        whole.update(hashlib.sha256(piece).digest())
    return whole.hexdigest()
