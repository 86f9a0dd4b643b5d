"""One job: load the adapter that it goes on from, plan, step by step, commit."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import transformers
import tuneyard
from pydantic import TypeAdapter, ValidationError
from tuneyard import blobs, leases, models, table
from tuneyard.configs import RLConfig, SFTConfig, SFTExperimentalConfig
from tuneyard.errors import Invalid, NotFound, TrainingError
from tuneyard.leases import Lost
from tuneyard.records import Checkpoint, Job, JobKind, Model
from tuneyard.settings import BaseModelSpec
from tuneyard.trajectories import TrajectoryGroup

from tuneyard_host import bases
from tuneyard_host.training import adapters, rl, sft
from tuneyard_host.training.adapters import Learner
from tuneyard_host.training.plans import Plan

Tell = Callable[..., Job]
_GROUPS = TypeAdapter(list[TrajectoryGroup])


class Prepared(NamedTuple):
    """A job that is ready to go: what it will do, and the doing, a dictionary of metrics for each gradient step."""

    plan: Plan
    steps: Iterator[dict[str, float]]
    seed: int


def run(job: Job, tell: Tell) -> None:
    """Load, plan, step, step, commit: each step is an event, and the checkpoint appears together with the last one."""
    model = table.get(Model, job.model_id)
    if model is None:
        raise Lost
    learner = adapters.learner_for(bases.load(_base(job)), model.lora)
    resume(learner, job)
    body = _input(job)
    prepared = (prepare_rl if job.kind is JobKind.RL else prepare_sft)(job, body, learner)
    plan = prepared.plan
    job = tell(
        "training_started",
        {"num_sequences": plan.num_sequences},
        num_sequences=plan.num_sequences,
        num_trained_tokens=plan.num_trained_tokens,
    )
    if plan.warnings or plan.notes:
        job = tell(
            "warning",
            {"dropped": plan.warnings, "message": " ".join(plan.notes) or "Some input was dropped."},
        )
    total: dict[str, float] = {}
    for done, metrics in enumerate(prepared.steps, start=1):
        job = tell("gradient_step", metrics, steps_done=done)
        total = {name: total.get(name, 0.0) + value for name, value in metrics.items()}
    leases.commit(
        job,
        step=model.last_step + 1,
        files=learner.files(),
        metrics={name: value / plan.num_sequences for name, value in total.items()},
        lineage=_lineage(job, learner, body, prepared.seed),
    )


def prepare_rl(job: Job, body: bytes, learner: Learner) -> Prepared:
    """Read the trajectory groups and plan their rows."""
    try:
        sent = json.loads(body)
        groups = _GROUPS.validate_python(sent["trajectory_groups"] if isinstance(sent, dict) else sent)
    except (ValueError, KeyError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        place = ".".join(map(str, first["loc"])) + ": " + first["msg"] if first else str(error)
        raise TrainingError(f"The trajectory groups cannot be read: {place}") from error
    config, seed = RLConfig(**_given(job.experimental_config)), _seed(job)
    plan = rl.plan(groups, learner.base, config, seed=seed)
    rate = _rate(job, config.learning_rate)
    return Prepared(plan, rl.steps(plan, learner, config, rate, reference=_reference(job, config)), seed)


def prepare_sft(job: Job, body: bytes, learner: Learner) -> Prepared:
    """Read the conversations and plan their batches."""
    config, extra = SFTConfig(**job.config), SFTExperimentalConfig(**job.experimental_config)
    examples = sft.read_examples(body.splitlines())
    seed = _seed(job)
    plan = sft.plan(examples, learner.base, config, extra, seed=seed)
    return Prepared(plan, sft.steps(plan, learner, config, _rate(job, None)), seed)


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


def _files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """A checkpoint's files, each checked against the digest in its record."""
    files = {file.name: blobs.get(checkpoint.prefix + file.name) for file in checkpoint.files}
    for file in checkpoint.files:
        if hashlib.sha256(files[file.name]).hexdigest() != file.sha256:
            raise TrainingError(
                f"The file {file.name} of step {checkpoint.step} is damaged: its SHA-256 is another."
            )
    return files


def _reference(job: Job, config: RLConfig) -> dict[str, bytes] | None:
    """The adapter of the KL penalty, None for the base model."""
    step = config.kl_penalty_reference_step
    if config.kl_penalty_step_lag is not None:
        step = max(0, (job.parent_step or 0) - config.kl_penalty_step_lag)
    return _files(_checkpoint(job, step)) if step and config.kl_penalty_coef else None


def _base(job: Job) -> BaseModelSpec:
    try:
        return models.base_model(job.base_model)
    except Invalid as error:
        raise TrainingError(str(error)) from error


def _input(job: Job) -> bytes:
    try:
        return blobs.get_unpacked(job.input_key)
    except (NotFound, EOFError, OSError) as error:
        raise TrainingError("The job's stored input is missing or damaged. Send the job again.") from error


def _rate(job: Job, wanted: float | None) -> float:
    return _base(job).learning_rate if wanted is None else wanted


def _given(settled: dict[str, Any]) -> dict[str, Any]:
    """A stored config without the second spelling of a switch, which was settled when the job was made."""
    return {name: value for name, value in settled.items() if name not in ("ppo", "normalize_advantages")}


def _seed(job: Job) -> int:
    return int.from_bytes(hashlib.sha256(job.id.encode()).digest()[:4], "big")


def _lineage(job: Job, learner: Learner, body: bytes, seed: int) -> dict[str, Any]:
    return {
        "job_id": job.id,
        "parent_step": job.parent_step,
        "base_model": job.base_model,
        "base_digest": learner.base.digest,
        "data_sha256": hashlib.sha256(body).hexdigest(),
        "config": job.config,
        "experimental_config": job.experimental_config,
        "seed": seed,
        "versions": {
            "tuneyard": tuneyard.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }
