"""Models through the public door."""

from __future__ import annotations

from fastapi.testclient import TestClient

BODY = {
    "entity": None,
    "project": "p",
    "name": "agent",
    "base_model": "tuneyard/tiny",
    "return_existing": True,
}


def test_a_model_is_made_with_a_run_and_its_base_models_learning_rate(api: TestClient):
    made = api.post("/v1/preview/models", json=BODY)

    assert made.status_code == 200
    body = made.json()
    assert (body["entity"], body["project"], body["name"]) == ("acme", "p", "agent")
    assert body["run_id"] and body["recommended_learning_rate"] == 0.003


def test_the_same_name_again_returns_the_first_model_only_when_asked(api: TestClient):
    first = api.post("/v1/preview/models", json=BODY).json()

    assert api.post("/v1/preview/models", json=BODY).json()["id"] == first["id"]
    again = api.post("/v1/preview/models", json=BODY | {"return_existing": False})
    assert again.status_code == 409
    assert "return_existing" in again.json()["error"]["message"]
