"""What nobody should send, sent through the chat door to a running inference service: each is refused by a sentence."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from chat_fixtures import CHAT, HELLO, commit, door, files_of, model, new_model, send, trained  # noqa: F401
from inference_fixtures import base_folder, bucket  # noqa: F401
from tuneyard.settings import settings

NODE: dict[str, Any] = {"$ref": "#/$defs/node"}
RECURSIVE = {
    "$defs": {"node": {"type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, NODE]}}, "required": ["next"],
                       "additionalProperties": False}},
    "$ref": "#/$defs/node",
}  # fmt: skip


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
        {"response_format": asked({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})}, 422, "response_format"),
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


def test_another_teams_model_does_not_exist(door: TestClient, trained: str, stranger: dict[str, str]):
    theirs = door.post(CHAT, json={"model": trained, "messages": HELLO}, headers=stranger)
    nobodys = door.post(CHAT, json={"model": "acme/p/nothing", "messages": HELLO}, headers=stranger)

    assert theirs.status_code == nobodys.status_code == 404
    assert theirs.json()["error"]["code"] == nobodys.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("broken", ["weights", "config", "missing"])
def test_a_broken_adapter_in_the_bucket_is_told_and_harms_no_other_model(
    door: TestClient, trained: str, bucket: Path, broken: str
):
    files = files_of(bucket / "a1")
    match broken:
        case "weights":
            files["adapter_model.safetensors"] = files["adapter_model.safetensors"][:-100]
        case "config":
            files["adapter_config.json"] = b"{"
        case "missing":
            del files["adapter_model.safetensors"]
    response = send(door, model=commit(door, new_model(door), files))

    assert response.status_code == (404 if broken == "missing" else 422)
    assert "checkpoint" in response.json()["error"]["message"]
    assert send(door, model=trained).status_code == 200
