"""What the chat tests share: the door of an account whose inference service runs beside it, and models to chat with."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from inference_fixtures import TOKEN, base_folder, bucket  # noqa: F401
from tuneyard import blobs, leases
from tuneyard.settings import BaseModelSpec, settings
from tuneyard_host.inference.service import create_app
from vllm_fixtures import on_a_socket

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def door(api: TestClient, base_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """The door of an AWS account whose inference service runs beside it."""
    spec = BaseModelSpec(id="tuneyard/test", source=str(base_folder))
    with on_a_socket(create_app([spec], blobs.get, TOKEN)) as address:
        monkeypatch.setenv("TUNEYARD_BASE_MODELS", json.dumps([spec.model_dump()]))
        monkeypatch.setenv("TUNEYARD_INFERENCE_ENGINE_URL", address)
        monkeypatch.setenv("TUNEYARD_ENGINE_TOKEN", TOKEN)
        settings.cache_clear()
        yield api


def send(door: TestClient, **options: Any) -> Any:
    """The answer to a chat; the body is written as JSON by Python, which also writes NaN and lone surrogates."""
    body = json.dumps({"model": "tuneyard/test", "messages": HELLO, "max_tokens": 4, **options})
    return door.post(CHAT, content=body, headers={"Content-Type": "application/json"})


def files_of(folder: Path) -> dict[str, bytes]:
    """An adapter's files."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def model(door: TestClient) -> dict[str, Any]:
    """A model of the team without a checkpoint."""
    return new_model(door)


def new_model(door: TestClient, name: str | None = None) -> dict[str, Any]:
    body = {"project": "p", "name": name or f"m{time.monotonic_ns()}", "base_model": "tuneyard/test"}
    made: dict[str, Any] = door.post("/v1/preview/models", json=body).raise_for_status().json()
    return made


def commit(door: TestClient, model: dict[str, Any], files: dict[str, bytes], *, step: int = 1) -> str:
    """Give the model a checkpoint of these files; the model's name in chat."""
    group = {
        "trajectories": [
            {"messages_and_choices": [*HELLO, {"index": 0, "message": {"role": "assistant"}}], "reward": 1}
        ]
    }
    made = door.post(
        "/v1/preview/training-jobs", json={"model_id": model["id"], "trajectory_groups": [group]}
    ).json()
    job = leases.claim(made["id"], worker="w")
    assert job is not None
    leases.commit(job, step=step, files=files, metrics={}, lineage={})
    return str(model["inference_name"])


@pytest.fixture
def trained(door: TestClient, model: dict[str, Any], bucket: Path) -> str:
    """The model's name, when it has one checkpoint that is whole."""
    return commit(door, model, files_of(bucket / "a0"))
