"""What can go wrong with a job ends that job with a sentence, and the worker takes the next one."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient

from conftest import TINY
from test_trainer import MODEL, rollout, work_off
from training_fixtures import one_thread  # noqa: F401  a fixture
from tuneyard import blobs, table
from tuneyard.records import Checkpoint, Job
from tuneyard.settings import settings
from tuneyard_host import bases
from tuneyard_host.training import adapters, rl, work

JOBS = "/v1/preview/training-jobs"


@pytest.fixture
def submit(api: TestClient) -> Callable[..., str]:
    """A job on a model of its own, or on the one that is named."""
    made = iter(range(100))

    def one(model_id: str | None = None, *, base_model: str = "tuneyard/tiny", **config: Any) -> str:
        number = next(made)
        if model_id is None:
            body = MODEL | {"name": f"unlucky-{number}", "base_model": base_model}
            model_id = api.post("/v1/preview/models", json=body).json()["id"]
        groups = [
            {"trajectories": [rollout("maybe", 1.0 + number), rollout("yes", 0.5), rollout("no", 0.75)]}
        ]
        body = {"model_id": model_id, "trajectory_groups": groups, "experimental_config": config}
        return str(api.post(JOBS, json=body).raise_for_status().json()["id"])

    return one


def end_of(api: TestClient, job_id: str) -> tuple[str, str | None]:
    job = api.get(f"{JOBS}/{job_id}").json()
    events = api.get(f"{JOBS}/{job_id}/events").json()["data"]
    assert events[-1]["type"] == ("training_ended" if job["status"] == "succeeded" else "training_failed")
    return job["status"], job["error_message"]


@pytest.mark.parametrize(
    "body", [b"", b"\x1f\x8b broken gzip", b"not json", b'{"trajectory_groups": 7}'], ids=repr
)
def test_a_corrupted_input(api: TestClient, submit: Callable[..., str], body: bytes):
    unlucky, lucky = submit(), submit()
    blobs.put(table.get(Job, unlucky).input_key, body)
    work_off()

    status, reason = end_of(api, unlucky)
    assert status == "failed" and ("damaged" in reason or "cannot be read" in reason), reason
    assert end_of(api, lucky) == ("succeeded", None)


def test_an_input_that_is_gone(api: TestClient, submit: Callable[..., str]):
    unlucky, lucky = submit(), submit()
    blobs.delete_prefix(table.get(Job, unlucky).input_key)
    work_off()

    assert end_of(api, unlucky)[1] == "The job's stored input is missing or damaged. Send the job again."
    assert end_of(api, lucky) == ("succeeded", None)


def test_a_damaged_parent_checkpoint(api: TestClient, submit: Callable[..., str]):
    first = submit()
    work_off()
    model_id = table.get(Job, first).model_id
    parent = table.get(Checkpoint, model_id, 1)
    blobs.put(parent.prefix + adapters.ADAPTER, b"bits that rotted")
    second = submit(model_id)
    work_off()

    status, reason = end_of(api, second)
    assert status == "failed" and "adapter_model.safetensors of step 1 is damaged" in reason


def test_a_base_model_that_disappeared(
    api: TestClient, submit: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    shutil.copytree(bases.BUILT_IN["builtin:tiny"], tmp_path / "base")
    mine = {"id": "mine", "source": str(tmp_path / "base"), "learning_rate": 0.003}
    monkeypatch.setenv("TUNEYARD_BASE_MODELS", json.dumps([TINY, mine]))
    settings.cache_clear()
    unlucky, lucky = submit(base_model="mine"), submit()
    shutil.rmtree(tmp_path / "base")
    work_off()

    status, reason = end_of(api, unlucky)
    assert status == "failed" and "The base model 'mine' cannot be loaded" in reason
    assert end_of(api, lucky) == ("succeeded", None)


def test_a_base_model_that_is_no_longer_on_offer(
    api: TestClient, submit: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TUNEYARD_BASE_MODELS", json.dumps([TINY, TINY | {"id": "passing"}]))
    settings.cache_clear()
    unlucky = submit(base_model="passing")
    monkeypatch.setenv("TUNEYARD_BASE_MODELS", json.dumps([TINY]))
    settings.cache_clear()
    work_off()

    status, reason = end_of(api, unlucky)
    assert status == "failed" and "'passing' is not on offer" in reason


def infinite(right: Callable[..., Any]) -> Callable[..., Any]:
    """Scoring whose log-probabilities are infinite."""

    def of_row(*args: Any, **options: Any) -> Any:
        new, entropy = right(*args, **options)
        return new * float("inf"), entropy

    return of_row


def failing(error: Exception) -> Callable[..., Any]:
    """What does nothing but fail, in place of anything."""

    def made(_: Callable[..., Any]) -> Callable[..., Any]:
        def fails(*_: Any, **__: Any) -> Any:
            raise error

        return fails

    return made


@pytest.mark.parametrize(
    ("module", "name", "broken", "sentence"),
    [
        (rl, "of_row", infinite, "not a finite number"),
        (
            rl,
            "of_row",
            failing(torch.OutOfMemoryError("CUDA out of memory")),
            "does not fit this worker's memory",
        ),
        (work, "as_parquet", failing(OSError(errno.ENOSPC, "No space left")), "disk of the worker is full"),
        (work, "prepare", failing(KeyError("what nobody thought of")), "internal error (KeyError)"),
    ],
    ids=["infinite loss", "no memory for one conversation", "full disk", "bug"],
)
def test_a_misfortune_of_one_job_is_told_and_the_next_one_trains(
    api: TestClient, submit: Callable[..., str], module: Any, name: str, broken: Any, sentence: str
):
    with pytest.MonkeyPatch.context() as for_now:
        for_now.setattr(module, name, broken(getattr(module, name)))
        unlucky = submit()
        work_off()
    lucky = submit()
    work_off()

    status, reason = end_of(api, unlucky)
    assert status == "failed" and sentence in reason
    assert table.get(Checkpoint, table.get(Job, unlucky).model_id, 1) is None
    assert end_of(api, lucky) == ("succeeded", None)
