"""How records look on the wire: ids and times as text, and nothing of leases and keys."""

from __future__ import annotations

from typing import Any

from tuneyard import blobs, checkpoints, models
from tuneyard.clock import iso
from tuneyard.jobs import queue_position
from tuneyard.records import Checkpoint, Job, JobEvent, Model, Usage
from tuneyard.settings import settings


def model(record: Model) -> dict[str, Any]:
    """A model, with the learning rate that works on its base."""
    shown = record.model_dump(
        mode="json", include={"id", "entity", "project", "name", "base_model", "run_id", "lora", "created_by"}
    )
    rates = {spec.id: spec.learning_rate for spec in models.base_models()}
    return shown | {
        "object": "model",
        "created_at": iso(record.created_at),
        "last_step": record.last_step,
        "recommended_learning_rate": rates.get(record.base_model),
        "inference_name": f"wandb-artifact:///{record.collection}",
    }


def checkpoint(of: Model, record: Checkpoint, newest: Checkpoint | None) -> dict[str, Any]:
    """A checkpoint as a list shows it."""
    return {
        "id": record.id,
        "object": "checkpoint",
        "step": record.step,
        "metrics": record.metrics,
        "job_id": record.job_id,
        "kind": record.kind,
        "aliases": checkpoints.aliases(record, newest),
        "inference_name": f"wandb-artifact:///{of.collection}:step{record.step}",
        "created_at": iso(record.created_at),
    }


def checkpoint_with_files(of: Model, record: Checkpoint, newest: Checkpoint | None) -> dict[str, Any]:
    """A checkpoint with its lineage and a presigned address for each of its files."""
    seconds = settings().upload_seconds
    files = [
        file.model_dump() | {"url": blobs.download_url(record.prefix + file.name, seconds=seconds)}
        for file in record.files
    ]
    return checkpoint(of, record, newest) | {
        "lineage": record.lineage,
        "files": files,
        "urls_expire_in": seconds,
    }


def job(record: Job) -> dict[str, Any]:
    """A job as its owner sees it."""
    end = record.finished_at
    running_ms = (
        max(0, (end or record.started_at or 0) - (record.started_at or 0)) if record.started_at else 0
    )
    moments = {"created_at": record.created_at, "started_at": record.started_at, "finished_at": end}
    return record.model_dump(
        mode="json",
        include={
            "id",
            "status",
            "kind",
            "model_id",
            "base_model",
            "config",
            "experimental_config",
            "training_data_url",
            "error_message",
            "checkpoint_step",
            "created_by",
            "num_sequences",
            "num_trained_tokens",
        },
    ) | {
        "object": "training_job",
        **{name: None if moment is None else iso(moment) for name, moment in moments.items()},
        "queue_position": queue_position(record),
        "progress": {"gradient_steps": record.steps_done, "of": record.num_sequences},
        "estimated_cost": round(running_ms / 3_600_000 * settings().worker_hour_price, 6),
    }


def usage(record: Usage) -> dict[str, Any]:
    """One day's use of one model in one project."""
    shown = record.model_dump(exclude={"training_ms"})
    return (
        {"id": f"{record.day}#{record.project}#{record.model}", "object": "usage"}
        | shown
        | {
            "total_tokens": record.prompt_tokens + record.completion_tokens,
            "training_seconds": record.training_ms / 1000,
        }
    )


def event(record: JobEvent) -> dict[str, Any]:
    """One entry of a job's history."""
    return {
        "id": record.id,
        "object": "training_job.event",
        "type": record.type,
        "data": record.data,
        "created_at": iso(record.created_at),
    }
