"""Bad input: a clear error in one shape, and nothing is lost."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tuneyard.settings import settings

MODEL = {"project": "p", "name": "agent", "base_model": "tuneyard/tiny"}
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "yes"}, "logprobs": None}
GROUP = {"trajectories": [{"messages_and_choices": [{"role": "user", "content": "?"}, CHOICE], "reward": 1}]}
JOBS = "/v1/preview/training-jobs"


@pytest.fixture
def model_id(api: TestClient) -> str:
    return api.post("/v1/preview/models", json=MODEL).json()["id"]


def told(response: Any) -> str:
    """The sentence of an error, after a look at its shape."""
    body = response.json()
    assert set(body) == {"detail", "error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]["message"]


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer nope"}, {"Authorization": "Basic abc"}])
def test_without_a_known_key_every_door_is_401(api: TestClient, headers: dict[str, str]):
    del api.headers["Authorization"]

    for method, path in (
        ("GET", "/v1/preview/models"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
    ):
        answer = api.request(method, path, headers=headers, json={} if method == "POST" else None)
        assert answer.status_code == 401
        assert "API key" in told(answer)


@pytest.mark.parametrize("path", ["/v1/health", "/v1/preview/base-models"])
def test_health_and_base_models_need_no_key(api: TestClient, path: str):
    del api.headers["Authorization"]

    assert api.get(path).status_code == 200


def test_ids_of_another_team_are_404_everywhere(api: TestClient, model_id: str, stranger: dict[str, str]):
    job_id = api.post(JOBS, json={"model_id": model_id, "trajectory_groups": [GROUP]}).json()["id"]

    for method, path, body in (
        ("GET", f"/v1/preview/models/{model_id}", None),
        ("DELETE", f"/v1/preview/models/{model_id}", None),
        ("GET", f"/v1/preview/models/{model_id}/checkpoints", None),
        ("DELETE", f"/v1/preview/models/{model_id}/checkpoints", {"steps": [1]}),
        ("POST", f"/v1/preview/models/{model_id}/log", {"split": "val", "trajectory_groups": []}),
        ("POST", JOBS, {"model_id": model_id, "trajectory_groups": [GROUP]}),
        ("GET", f"{JOBS}/{job_id}", None),
        ("GET", f"{JOBS}/{job_id}/events", None),
        ("POST", f"{JOBS}/{job_id}/cancel", None),
        (
            "POST",
            "/v1/chat/completions",
            {"model": "acme/p/agent", "messages": [{"role": "user", "content": "?"}]},
        ),
    ):
        answer = api.request(method, path, json=body, headers=stranger)
        assert (answer.status_code, path) == (404, path)
        told(answer)
    assert api.get("/v1/preview/models", headers=stranger).json()["data"] == []
    assert api.get(JOBS, params={"model_id": model_id}, headers=stranger).json()["data"] == []


def test_malformed_json_is_400(api: TestClient):
    answer = api.post(
        "/v1/preview/models", content=b'{"project": ', headers={"Content-Type": "application/json"}
    )

    assert answer.status_code == 400
    assert "not valid JSON" in told(answer)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"base_model": "gpt-7"}, "tuneyard/tiny"),
        ({"name": "a/b"}, "name"),
        ({"name": ""}, "name"),
        ({"colour": "red"}, "colour"),
        ({"project": None}, "project"),
        ({"lora": {"rank": 0}}, "rank"),
        ({"lora": {"ranks": 8}}, "ranks"),
    ],
)
def test_a_model_that_cannot_be_is_422_and_says_why(api: TestClient, change: dict[str, Any], names: str):
    answer = api.post("/v1/preview/models", json=MODEL | change)

    assert answer.status_code == 422
    assert names in told(answer)


@pytest.mark.parametrize("reward", ["NaN", "Infinity", '"1"', "true", "null"])
def test_a_reward_must_be_a_finite_number(api: TestClient, model_id: str, reward: str):
    body = json.dumps({"model_id": model_id, "trajectory_groups": [GROUP]}).replace(
        '"reward": 1', f'"reward": {reward}'
    )

    answer = api.post(JOBS, content=body, headers={"Content-Type": "application/json"})

    assert answer.status_code == 422
    assert "reward" in told(answer)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"learning_rat": 1e-3}, "learning_rate"),
        ({"epsilon": -1}, "epsilon"),
        ({"ppo": True, "loss_fn": "cispo"}, "contradict"),
        ({"kl_penalty_reference_step": 1, "kl_penalty_step_lag": 1}, "exclude each other"),
        ({"scale_learning_rate_by_reward_std_dev": True}, "not supported"),
        ({"advantage_balance": 2}, "advantage_balance"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_422_by_name(
    api: TestClient, model_id: str, config: dict[str, Any], names: str
):
    body = {"model_id": model_id, "trajectory_groups": [GROUP], "experimental_config": config}

    answer = api.post(JOBS, json=body)

    assert answer.status_code == 422
    assert names in told(answer)


def test_null_means_default_in_a_config(api: TestClient, model_id: str):
    nulls = {"learning_rate": None, "epsilon": None, "epsilon_high": None, "ppo": None, "scale_rewards": None}

    made = api.post(
        JOBS, json={"model_id": model_id, "trajectory_groups": [GROUP], "experimental_config": nulls}
    )

    assert made.status_code == 200
    config = made.json()["experimental_config"]
    assert (config["epsilon"], config["epsilon_high"], config["ppo"]) == (1.0, 4.0, False)


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up"])
def test_a_page_that_cannot_be_is_422(api: TestClient, query: str):
    assert api.get(f"/v1/preview/models?{query}").status_code == 422


def test_an_unknown_after_is_422_and_never_a_restart(api: TestClient, model_id: str):
    job = api.post(JOBS, json={"model_id": model_id, "trajectory_groups": [GROUP]}).json()

    for path in (
        "/v1/preview/models",
        f"/v1/preview/models/{model_id}/checkpoints",
        JOBS,
        f"{JOBS}/{job['id']}/events",
    ):
        for after in ("nonsense", "00000000-0000-4000-8000-000000000000"):
            answer = api.get(path, params={"after": after})
            assert (answer.status_code, path) == (422, path)
            assert "after" in told(answer)


def test_a_body_over_the_limit_is_413_and_names_the_ways_out(api: TestClient):
    answer = api.post("/v1/preview/models", content=b"x" * (settings().max_body_bytes + 1))

    assert answer.status_code == 413
    assert "gzip" in told(answer) and "/v1/preview/uploads" in told(answer)


def test_a_gzipped_body_is_unpacked_and_a_bomb_is_413(api: TestClient, monkeypatch: pytest.MonkeyPatch):
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}

    made = api.post("/v1/preview/models", content=gzip.compress(json.dumps(MODEL).encode()), headers=headers)
    monkeypatch.setattr(settings(), "max_unpacked_bytes", 1_000_000)
    bomb = api.post("/v1/preview/models", content=gzip.compress(b" " * 50_000_000), headers=headers)
    torn = api.post("/v1/preview/models", content=gzip.compress(b"{}")[:-4], headers=headers)

    assert [made.status_code, bomb.status_code, torn.status_code] == [200, 413, 400]


def test_the_same_request_again_makes_one_job_while_it_is_not_final(api: TestClient, model_id: str):
    body = {"model_id": model_id, "trajectory_groups": [GROUP]}
    first = api.post(JOBS, json=body).json()["id"]

    assert api.post(JOBS, json=body).json()["id"] == first
    assert api.post(JOBS, json=body | {"experimental_config": {"ppo": True}}).json()["id"] != first
    api.post(f"{JOBS}/{first}/cancel")
    assert api.post(JOBS, json=body).json()["id"] != first


def test_an_idempotency_key_answers_with_its_job_and_refuses_another_body(api: TestClient, model_id: str):
    body, key = {"model_id": model_id, "trajectory_groups": [GROUP]}, {"Idempotency-Key": "k"}
    first = api.post(JOBS, json=body, headers=key).json()["id"]
    api.post(f"{JOBS}/{first}/cancel")

    assert api.post(JOBS, json=body, headers=key).json()["id"] == first
    assert api.post(JOBS, json=body | {"trajectory_groups": [GROUP, GROUP]}, headers=key).status_code == 409


def test_a_cancelled_job_tells_polling_clients_and_frees_the_queue(api: TestClient, model_id: str):
    body = {"model_id": model_id, "trajectory_groups": [GROUP]}
    first = api.post(JOBS, json=body).json()
    second = api.post(JOBS, json=body | {"experimental_config": {"ppo": True}}).json()
    assert (first["queue_position"], second["queue_position"]) == (0, 1)

    cancelled = api.post(f"{JOBS}/{first['id']}/cancel").json()

    assert cancelled["status"] == "cancelled"
    (event,) = api.get(f"{JOBS}/{first['id']}/events").json()["data"]
    assert event["type"] == "training_failed"
    assert event["data"]["error_message"] == "cancelled by ada"
    assert api.get(f"{JOBS}/{second['id']}").json()["queue_position"] == 0


def test_deleting_a_model_cancels_its_jobs_and_frees_its_name(api: TestClient, model_id: str):
    job = api.post(JOBS, json={"model_id": model_id, "trajectory_groups": [GROUP]}).json()

    assert api.delete(f"/v1/preview/models/{model_id}").status_code == 200

    assert api.get(f"/v1/preview/models/{model_id}").status_code == 404
    assert api.get(f"{JOBS}/{job['id']}").json()["status"] == "cancelled"
    assert api.post("/v1/preview/models", json=MODEL).json()["id"] != model_id


def test_an_upload_must_be_there_and_be_the_teams(api: TestClient, model_id: str, stranger: dict[str, str]):
    theirs = api.post("/v1/preview/uploads", headers=stranger).json()["url"]
    for url, status in (
        (theirs, 404),
        ("upload://x", 422),
        ("file:///etc/passwd", 422),
        ("https://a.b/c", 422),
    ):
        body = {"model_id": model_id, "training_data_url": url}
        answer = api.post("/v1/preview/sft-training-jobs", json=body)
        assert (answer.status_code, url) == (status, url)


def test_the_log_operation_summarises_into_the_run(api: TestClient, model_id: str):
    groups = [
        {
            "trajectories": [
                {"messages_and_choices": [CHOICE], "reward": 1, "metrics": {"turns": 2, "won": True}},
                {"messages_and_choices": [CHOICE], "reward": 0, "metrics": {"turns": 4, "won": False}},
            ],
            "exceptions": [{"type": "E", "message": "m", "traceback": "t"}] * 2,
        }
    ]

    answer = api.post(
        f"/v1/preview/models/{model_id}/log",
        json={"model_id": model_id, "split": "val", "trajectory_groups": groups},
    )

    assert answer.json() == {}
    from tuneyard import table
    from tuneyard.records import Model, RunRow

    model = table.get(Model, model_id)
    assert model is not None
    (row,) = table.children(RunRow, model.run_id, limit=10)
    assert row.metrics == {
        "val/reward": 0.5, "val/reward_std_dev": 0.5, "val/exception_rate": 0.5, "val/turns": 3.0, "val/won": 0.5,
    }  # fmt: skip
