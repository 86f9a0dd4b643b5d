"""One job: load the adapter that it goes on from, plan, step by step, commit."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
import transformers
from pydantic import TypeAdapter, ValidationError

import tuneyard
from tuneyard import blobs, checkpoints, leases, models, table
from tuneyard.configs import RLConfig, SFTConfig, SFTExperimentalConfig
from tuneyard.errors import Invalid, NotFound, TrainingError
from tuneyard.leases import Lost
from tuneyard.records import Checkpoint, Identity, Job, JobKind, Model, Role
from tuneyard.settings import BaseModelSpec
from tuneyard.trajectories import TrajectoryGroup
from tuneyard_host import bases
from tuneyard_host.bases import Base
from tuneyard_host.training import adapters, rl, sft, world
from tuneyard_host.training.adapters import ADAPTER, CONFIG, OPTIMIZER, Learner
from tuneyard_host.training.plans import Plan
from tuneyard_host.training.progress import Mark, Progress

_GROUPS = TypeAdapter(list[TrajectoryGroup])


class Stopped(Exception):
    """The trainer is told to stop while a job runs."""


class Teller:
    """Appends a job's events in order, and passes over those that an earlier life of the job has written."""

    def __init__(self, job: Job, stop: threading.Event) -> None:
        self.job = job
        self._stop = stop
        self._written = job.progress
        self._told = 0

    def pass_over(self, count: int) -> None:
        """Count events as told: those of the gradient steps that a resumed job need not take again."""
        self._told += count

    def tell(self, kind: str, data: dict[str, Any], **changes: Any) -> Job:
        """Append the job's next event; Lost when the job is no longer ours, Stopped when the trainer is to stop."""
        if self._stop.is_set():
            raise Stopped
        self._told += 1
        if self._told > self._written:
            self.job = leases.report(self.job, kind, data, **changes)
        return self.job


Steps = Callable[[int], Iterator[dict[str, float]]]
"""The gradient steps of a job from a number on: a dictionary of metrics for each."""


def run(job: Job, teller: Teller, *, shard: bool = False) -> None:
    """Load, plan, step, step, commit: each step is an event, and the checkpoint appears together with the last one.

    In a world of several processes the others take part by ``follow``.
    """
    model = table.get(Model, job.model_id)
    if model is None:
        raise Lost
    world.agreed((job, model))
    try:
        learner, body = _learner(job, model, shard=shard), read_input(job)
        plan, steps = prepare(job, body, learner)
        started = {"num_sequences": plan.num_sequences}
        teller.tell("training_started", started, **started, num_trained_tokens=plan.num_trained_tokens)
        if plan.warnings or plan.notes:
            teller.tell(
                "warning",
                {"dropped": plan.warnings, "message": " ".join(plan.notes) or "Some input was dropped."},
            )
        progress = Progress(job)
        mark = progress.load(learner, told=job.steps_done) or Mark(0, {}, {})
        mark.restore(plan)
        done, total = mark.step, mark.total
        teller.pass_over(done)
        for number, metrics in enumerate(_in_step(steps(done)), start=done + 1):
            teller.tell("gradient_step", metrics, steps_done=number)
            total = {name: total.get(name, 0.0) + value for name, value in metrics.items()}
            progress.mark(learner, plan, number, total)
        leases.commit(
            teller.job,
            step=model.last_step + 1,
            files=learner.files() | {"ledger.parquet": as_parquet(plan.ledger)},
            metrics={name: value / plan.num_sequences for name, value in total.items()},
            lineage=_lineage(job, learner, body),
        )
        progress.forget()
    finally:
        world.agreed(None)


def follow(job: Job, model: Model, *, shard: bool) -> None:
    """Take part in a job that process 0 runs: the same plan and the same steps, and nothing told or stored."""
    learner = _learner(job, model, shard=shard)
    plan, steps = prepare(job, read_input(job), learner)
    mark = Progress(job).load(learner, told=job.steps_done) or Mark(0, {}, {})
    mark.restore(plan)
    for _ in _in_step(steps(mark.step)):
        pass


def _in_step(steps: Iterator[dict[str, float]]) -> Iterator[dict[str, float]]:
    """The gradient steps, each taken when process 0 asks for it, until it says anything else."""
    while world.agreed("step") == "step":
        metrics = next(steps, None)
        if metrics is None:
            return
        yield metrics


def _learner(job: Job, model: Model, *, shard: bool) -> Learner:
    learner = adapters.learner_for(bases.load(base_spec(job)), model.lora)
    if shard:
        world.shard(learner.base.model)
    return learner


def replay(job: Job) -> tuple[str, str]:
    """Train a job that succeeded again from its stored input; the SHA-256 of its adapter then, and of the one now.

    On as many threads as then: another number adds up in another order.
    Raises NotFound when the job made no checkpoint that is still there, TrainingError when its input is gone.
    """
    model = table.get(Model, job.model_id)
    made = table.get(Checkpoint, job.model_id, job.checkpoint_step) if model and job.checkpoint_step else None
    if model is None or made is None:
        raise NotFound(f"Job {job.id!r} is {job.status}, and there is no checkpoint of it to compare with.")
    torch.set_num_threads(made.lineage["threads"])
    learner = adapters.learner_for(bases.load(base_spec(job)), model.lora)
    _, steps = prepare(job, read_input(job), learner)
    for _ in steps(0):
        pass
    then = next(file.sha256 for file in made.files if file.name == ADAPTER)
    return then, hashlib.sha256(learner.files()[ADAPTER]).hexdigest()


def prepare(job: Job, body: bytes, learner: Learner) -> tuple[Plan, Steps]:
    """Become the adapter that the job goes on from, and plan what it will do."""
    resume(learner, job)
    return (prepare_rl if job.kind is JobKind.RL else prepare_sft)(job, body, learner)


def prepare_rl(job: Job, body: bytes, learner: Learner) -> tuple[Plan, Steps]:
    """Read the trajectory groups and plan their rows."""
    config, plan = plan_rl(job, body, learner.base)
    rate, before = _rate(job, config.learning_rate), learner.files() if config.precalculate_logprobs else None
    reference = _reference(job, config)

    def steps(start: int) -> Iterator[dict[str, float]]:
        return rl.steps(plan, learner, config, rate, start=start, reference=reference, before=before)

    return plan, steps


def prepare_sft(job: Job, body: bytes, learner: Learner) -> tuple[Plan, Steps]:
    """Read the conversations and plan their batches."""
    config, plan = plan_sft(job, body, learner.base)
    rate = _rate(job, None)
    return plan, lambda start: sft.steps(plan, learner, config, rate, start=start)


def plan_rl(job: Job, body: bytes, base: Base) -> tuple[RLConfig, Plan]:
    """What an RL job will do with this input."""
    try:
        sent = json.loads(body)
        groups = _GROUPS.validate_python(sent["trajectory_groups"] if isinstance(sent, dict) else sent)
    except (ValueError, KeyError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        place = ".".join(map(str, first["loc"])) + ": " + first["msg"] if first else str(error)
        raise TrainingError(f"The trajectory groups cannot be read: {place}") from error
    config = RLConfig(**_given(job.experimental_config))
    return config, rl.plan(groups, base, config, seed=_seed(job))


def plan_sft(job: Job, body: bytes, base: Base) -> tuple[SFTConfig, Plan]:
    """What an SFT job will do with this input."""
    config, extra = SFTConfig(**job.config), SFTExperimentalConfig(**job.experimental_config)
    return config, sft.plan(sft.read_examples(body.splitlines()), base, config, extra, seed=_seed(job))


def resume(learner: Learner, job: Job) -> None:
    """Become the checkpoint that the job goes on from. The optimizer goes on too, unless the kind of job changed."""
    if not job.parent_step:
        learner.reset()
        return
    parent = _checkpoint(job, job.parent_step)
    learner.load(_files(parent), with_optimizer=parent.kind is job.kind)


def _checkpoint(job: Job, step: int) -> Checkpoint:
    found = table.get(Checkpoint, job.model_id, step)
    if found is None:
        raise TrainingError(
            f"The checkpoint of step {step}, which this job needs, was deleted. Start a new job."
        )
    return found


def as_parquet(ledger: list[dict[str, Any]]) -> bytes:
    """What became of each trajectory or line, as a Parquet file with one row for each."""
    flat = [{k: json.dumps(v) if isinstance(v, dict) else v for k, v in row.items()} for row in ledger]
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(flat), stream)
    return stream.getvalue()


def _files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """A checkpoint's adapter and optimizer, each file checked against the digest in its record."""
    wanted = [file for file in checkpoint.files if file.name in (ADAPTER, CONFIG, OPTIMIZER)]
    files = {file.name: blobs.get(checkpoint.prefix + file.name) for file in wanted}
    for file in wanted:
        if hashlib.sha256(files[file.name]).hexdigest() != file.sha256:
            raise TrainingError(
                f"The file {file.name} of step {checkpoint.step} is damaged: its SHA-256 is another."
            )
    return files


def _reference(job: Job, config: RLConfig) -> dict[str, bytes] | None:
    """The adapter of the KL penalty, None for the base model."""
    found = reference_checkpoint(job, config)
    return None if found is None else _files(found)


def reference_checkpoint(job: Job, config: RLConfig) -> Checkpoint | None:
    """The checkpoint that the KL penalty holds on to, None for the base model or where there is no penalty."""
    if config.kl_ref_adapter_path is not None:
        return _named_checkpoint(job, config.kl_ref_adapter_path) if config.kl_penalty_coef else None
    step = config.kl_penalty_reference_step
    if config.kl_penalty_step_lag is not None:
        step = max(0, (job.parent_step or 0) - config.kl_penalty_step_lag)
    return _checkpoint(job, step) if step and config.kl_penalty_coef else None


def _named_checkpoint(job: Job, name: str) -> Checkpoint:
    """The checkpoint ``entity/project/name:stepN``, as the job's owner may read it."""
    collection, _, alias = name.partition(":")
    model = models.named(Identity(job.team, job.created_by, Role.MEMBER, ""), collection)
    found = None if model is None else checkpoints.find(model, alias)
    if found is None:
        raise TrainingError(f"The checkpoint {name!r}, which this job needs, was deleted. Start a new job.")
    return found


def base_spec(job: Job) -> BaseModelSpec:
    try:
        return models.base_model(job.base_model)
    except Invalid as error:
        raise TrainingError(str(error)) from error


def read_input(job: Job) -> bytes:
    """What the job was sent, unpacked."""
    try:
        return blobs.get_unpacked(job.input_key)
    except (NotFound, EOFError, OSError) as error:
        raise TrainingError("The job's stored input is missing or damaged. Send the job again.") from error


def _rate(job: Job, wanted: float | None) -> float:
    return base_spec(job).learning_rate if wanted is None else wanted


def _given(settled: dict[str, Any]) -> dict[str, Any]:
    """A stored config without the second spelling of a switch, which was settled when the job was made."""
    return {name: value for name, value in settled.items() if name not in ("ppo", "normalize_advantages")}


def _seed(job: Job) -> int:
    return int.from_bytes(hashlib.sha256(job.id.encode()).digest()[:4], "big")


def _lineage(job: Job, learner: Learner, body: bytes) -> dict[str, Any]:
    return {
        "job_id": job.id,
        "parent_step": job.parent_step,
        "base_model": job.base_model,
        "base_digest": learner.base.digest,
        "data_sha256": hashlib.sha256(body).hexdigest(),
        "config": job.config,
        "experimental_config": job.experimental_config,
        "seed": _seed(job),
        "threads": torch.get_num_threads(),
        "versions": {
            "tuneyard": tuneyard.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }
