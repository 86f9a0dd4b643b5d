"""What nobody should send, sent through the chat door to a running inference service: each is refused by a sentence."""

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
NODE: dict[str, Any] = {"$ref": "#/$defs/node"}
RECURSIVE = {
    "$defs": {"node": {"type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, NODE]}}, "required": ["next"],
                       "additionalProperties": False}},
    "$ref": "#/$defs/node",
}  # fmt: skip


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


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def asked(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


CASES: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "no messages": ({"messages": []}, 422, "messages"),
    "messages of another kind": ({"messages": "hi"}, 422, "messages"),
    "unknown role": ({"messages": [{"role": "pirate", "content": "arr"}]}, 422, "messages.0.role"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 422, "messages.0"),
    "longer than the context": ({"messages": said("word " * 2000)}, 400, "messages"),
    "n of 1000": ({"n": 1000}, 422, "n"),
    "temperature below 0": ({"temperature": -1}, 422, "temperature"),
    "temperature above 2": ({"temperature": 3}, 422, "temperature"),
    "temperature that is no number": ({"temperature": float("nan")}, 422, "temperature"),
    "temperature without end": ({"temperature": float("inf")}, 422, "temperature"),
    "max_tokens 0": ({"max_tokens": 0}, 422, "max_tokens"),
    "stop with 100 strings": ({"stop": ["x"] * 100}, 422, "stop"),
    "a schema that is none": ({"response_format": asked({"type": "nothing"})}, 422, "response_format"),
    "a schema that refers nowhere": ({"response_format": asked({"$ref": "#/$defs/gone"})}, 422, "response_format"),
    "a schema that is its own definition": (
        {"response_format": asked({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})}, 422, None),
    "lone surrogates in a message": ({"messages": said("\ud800")}, 422, "messages"),
    "lone surrogates in a stop": ({"stop": ["\ud800"]}, 422, "stop"),
    "lone surrogates in a tool": (
        {"tools": [{"type": "function", "function": {"name": "f", "description": "\udfff"}}]}, 422, "tools"),
    "lone surrogates in a schema": ({"response_format": asked({"const": "\ud800"})}, 422, "response_format"),
    "lone surrogates for the template": ({"chat_template_kwargs": {"a": "\ud800"}}, 422, "chat_template_kwargs"),
    "lone surrogates in an option of nobody's": ({"whatever": "\ud800"}, 422, "whatever"),
    "a tool without a name": ({"tools": [{"type": "function", "function": {}}]}, 422, "tools"),
    "tools of another kind": ({"tools": ["f"]}, 422, "tools.0"),
    "an unknown model": ({"model": "nothing"}, 404, "model"),
}  # fmt: skip


def test_each_bad_input_is_refused_by_the_name_of_what_is_wrong_and_the_next_request_is_answered(
    door: TestClient,
):
    found = {}
    for case, (options, _, _) in CASES.items():
        response = send(door, **options)
        assert "error" in response.json(), (case, response.text)
        found[case] = (response.status_code, response.json()["error"]["param"])

    assert found == {case: (status, param) for case, (_, status, param) in CASES.items()}
    assert send(door).status_code == 200


def test_a_recursive_schema_is_followed_or_refused_and_never_hangs(door: TestClient):
    response = send(door, response_format=asked(RECURSIVE), max_tokens=60, seed=1)

    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["message"]["content"].startswith('{"next": ')
    assert choice["finish_reason"] == "length" or json.loads(choice["message"]["content"])


@pytest.mark.parametrize(
    "text", ["word " * 2_000_000, "x" * 10_000_000, " " * 10_000_000], ids=["words", "one word", "white"]
)
def test_ten_megabytes_are_refused_at_once(door: TestClient, monkeypatch: pytest.MonkeyPatch, text: str):
    assert send(door, messages=said(text)).status_code == 413
    monkeypatch.setenv("TUNEYARD_MAX_BODY_BYTES", "256000000")
    settings.cache_clear()
    send(door)
    began = time.monotonic()
    response = send(door, messages=said(text))

    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert time.monotonic() - began < 15


def test_a_body_that_is_no_json_is_400(door: TestClient):
    response = door.post(CHAT, content=b'{"model": ', headers={"Content-Type": "application/json"})

    assert response.status_code == 400


@pytest.fixture
def trained(door: TestClient, bucket: Path) -> str:
    """A model of the team with one checkpoint that is whole."""
    return commit(door, {file.name: file.read_bytes() for file in (bucket / "a0").iterdir()})


def commit(door: TestClient, files: dict[str, bytes]) -> str:
    """A new model with one checkpoint of these files; its name in chat."""
    body = {"project": "p", "name": f"m{time.monotonic_ns()}", "base_model": "tuneyard/test"}
    model = door.post("/v1/preview/models", json=body).json()
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
    leases.commit(job, step=1, files=files, metrics={}, lineage={})
    return str(model["inference_name"])


def test_a_checkpoint_answers_and_is_gone_the_moment_it_is_deleted(door: TestClient, trained: str):
    before = [send(door, model=f"{trained}:step1", seed=1), send(door, model=trained, seed=1)]
    model = next(m for m in door.get("/v1/preview/models").json()["data"] if trained.endswith(m["name"]))
    door.request(
        "DELETE", f"/v1/preview/models/{model['id']}/checkpoints", json={"steps": [1]}
    ).raise_for_status()
    after = send(door, model=f"{trained}:step1", seed=1)
    base = [send(door, model=name, seed=1) for name in (trained, "tuneyard/test")]

    assert [answer.status_code for answer in before] == [200, 200]
    assert (after.status_code, after.json()["error"]["code"]) == (404, "model_not_found")
    told = [answer.json()["choices"][0]["message"] for answer in [*before, *base]]
    assert told[0] == told[1] != told[2] == told[3]
    assert before[0].json()["choices"][0]["token_ids"]


def test_another_teams_model_does_not_exist(door: TestClient, trained: str, stranger: dict[str, str]):
    theirs = door.post(CHAT, json={"model": trained, "messages": HELLO}, headers=stranger)
    nobodys = door.post(CHAT, json={"model": "acme/p/nothing", "messages": HELLO}, headers=stranger)

    assert theirs.status_code == nobodys.status_code == 404
    assert theirs.json()["error"]["code"] == nobodys.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("broken", ["weights", "config", "missing"])
def test_a_broken_adapter_in_the_bucket_is_told_and_harms_no_other_model(
    door: TestClient, trained: str, bucket: Path, broken: str
):
    files = {file.name: file.read_bytes() for file in (bucket / "a1").iterdir()}
    match broken:
        case "weights":
            files["adapter_model.safetensors"] = files["adapter_model.safetensors"][:-100]
        case "config":
            files["adapter_config.json"] = b"{"
        case "missing":
            del files["adapter_model.safetensors"]
    response = send(door, model=commit(door, files))

    assert response.status_code == (404 if broken == "missing" else 422)
    assert "checkpoint" in response.json()["error"]["message"]
    assert send(door, model=trained).status_code == 200
