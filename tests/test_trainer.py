"""A worker and its queue: jobs from POST to checkpoint, on an emulated account and the real tiny model."""

from __future__ import annotations

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pyarrow.parquet as parquet
import pytest
from fastapi.testclient import TestClient

from tuneyard import leases, queues, table
from tuneyard.errors import TrainingError
from tuneyard.records import Job
from tuneyard_host.training import trainer, work

MODEL = {"project": "p", "name": "agent", "base_model": "tuneyard/tiny"}
PROMPT = [{"role": "user", "content": "Answer yes, no or maybe."}]


def rollout(answer: str, reward: float, logprob: float = -1.1) -> dict[str, Any]:
    """A trajectory of one generated word, as vLLM would have told of it."""
    from tuneyard.settings import settings
    from tuneyard_host import bases

    tokenizer = bases.load(settings().base_models[0]).tokenizer
    ids = tokenizer.encode(answer + "<|im_end|>", add_special_tokens=False)
    content = [{"token": f"token_id:{i}", "logprob": logprob, "bytes": None, "top_logprobs": []} for i in ids]
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": answer},
        "logprobs": {"content": content},
        "token_ids": ids,
    }
    return {"messages_and_choices": [*PROMPT, choice], "reward": reward}


@pytest.fixture
def model(api: TestClient) -> dict[str, Any]:
    return api.post("/v1/preview/models", json=MODEL).json()


def work_off() -> None:
    """Do a worker's turns until nothing waits; in this thread, for the emulated account stands no others."""
    for _ in range(50):
        if (message := queues.receive_job(wait_seconds=0, visible_after=60)) is None:
            return
        trainer._take(message.job_id, message, name="w", stop=threading.Event(), shard=False)


def events(api: TestClient, job_id: str) -> list[dict[str, Any]]:
    return api.get(f"/v1/preview/training-jobs/{job_id}/events?limit=100").json()["data"]


def ledger_of(api: TestClient, model: dict[str, Any], step: int) -> list[dict[str, Any]]:
    """The ledger of a checkpoint, from the address that its record names."""
    import requests

    checkpoint = api.get(f"/v1/preview/models/{model['id']}/checkpoints/{step}").json()
    (url,) = [file["url"] for file in checkpoint["files"] if file["name"] == "ledger.parquet"]
    return parquet.read_table(io.BytesIO(requests.get(url, timeout=5).content)).to_pylist()


def test_a_job_trains_and_its_checkpoint_appears_with_the_last_event(api: TestClient, model: dict[str, Any]):
    groups = [{"trajectories": [rollout("maybe", 1.0), rollout("yes", 0.5), rollout("no", 0.75)]}]
    body = {"model_id": model["id"], "trajectory_groups": groups, "experimental_config": None}

    job = api.post("/v1/preview/training-jobs", json=body).json()
    work_off()

    told = events(api, job["id"])
    assert [e["type"] for e in told] == ["training_started", "gradient_step", "training_ended"]
    assert told[0]["data"]["num_sequences"] == 1
    assert all(isinstance(float(v), float) for v in told[1]["data"].values())
    seen = api.get(f"/v1/preview/training-jobs/{job['id']}").json()
    assert (seen["status"], seen["checkpoint_step"]) == ("succeeded", 1)
    listed = api.get(f"/v1/preview/models/{model['id']}/checkpoints").json()["data"]
    assert [(c["step"], c["aliases"]) for c in listed] == [(1, ["step1", "latest"])]


def test_a_replayed_job_gives_the_same_adapter_bit_for_bit(api: TestClient, model: dict[str, Any]):
    for seed in range(2):
        groups = [{"trajectories": [rollout("maybe", 1.0 + seed), rollout("yes", 0.5), rollout("no", 0.75)]}]
        api.post("/v1/preview/training-jobs", json={"model_id": model["id"], "trajectory_groups": groups})
    work_off()

    for listed in api.get("/v1/preview/training-jobs").json()["data"]:
        job = table.get(Job, listed["id"])
        then, now = work.replay(job)
        assert then == now
    assert job.checkpoint_step == 2


def test_the_ledger_beside_the_adapter_tells_what_became_of_each_trajectory(
    api: TestClient, model: dict[str, Any]
):
    silent = {"messages_and_choices": [*PROMPT, {"role": "assistant", "content": "maybe"}], "reward": 0.5}
    groups = [
        {"trajectories": [rollout("maybe", 1.0), rollout("yes", 0.0), silent]},
        {"trajectories": [rollout("maybe", 1.0), rollout("yes", 1.0)]},
    ]

    job = api.post(
        "/v1/preview/training-jobs", json={"model_id": model["id"], "trajectory_groups": groups}
    ).json()
    work_off()

    rows = ledger_of(api, model, 1)
    assert [(row["group"], row["index"], row["dropped"]) for row in rows] == [
        (0, 0, None),
        (0, 1, None),
        (0, 2, "no trainable tokens"),
        (1, 0, "all rewards of the group are equal"),
        (1, 1, "all rewards of the group are equal"),
    ]
    assert rows[0]["advantage"] > 0 > rows[1]["advantage"]
    (warning,) = [event for event in events(api, job["id"]) if event["type"] == "warning"]
    assert warning["data"]["dropped"] == {"no trainable tokens": 1, "all rewards of the group are equal": 2}


def test_a_broken_line_fails_the_job_with_its_number_before_any_training(
    api: TestClient, model: dict[str, Any]
):
    import requests

    good = json.dumps({"messages": [*PROMPT, {"role": "assistant", "content": "maybe"}]})
    upload = api.post("/v1/preview/uploads").json()
    requests.put(upload["upload_url"], data="\n".join([good] * 36 + ['{"messages": [']).encode(), timeout=5)
    body = {"model_id": model["id"], "training_data_url": upload["url"]}

    job = api.post("/v1/preview/sft-training-jobs", json=body).json()
    work_off()

    (told,) = events(api, job["id"])
    assert told["type"] == "training_failed"
    assert "Line 37" in told["data"]["error_message"]


def test_equal_rewards_teach_nothing_and_the_job_says_so(api: TestClient, model: dict[str, Any]):
    groups = [{"trajectories": [rollout("maybe", 0.1), rollout("yes", 0.1), rollout("no", 0.1)]}]

    job = api.post(
        "/v1/preview/training-jobs", json={"model_id": model["id"], "trajectory_groups": groups}
    ).json()
    work_off()

    started, warning, ended = events(api, job["id"])
    assert started["data"]["num_sequences"] == 0
    assert "equal rewards" in warning["data"]["message"]
    assert ended["data"]["step"] == 1


def test_only_one_worker_can_claim_a_job(api: TestClient, model: dict[str, Any]):
    groups = [{"trajectories": [rollout("maybe", 1.0), rollout("yes", 0.5)]}]
    job = api.post(
        "/v1/preview/training-jobs", json={"model_id": model["id"], "trajectory_groups": groups}
    ).json()
    leases.claim(job["id"], worker="one")

    with pytest.raises(leases.NotYet):
        leases.claim(job["id"], worker="two")


def test_on_ecs_a_trainer_is_protected_from_scale_in_as_long_as_it_trains(
    api: TestClient, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    asked = []

    class Agent(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status = api.get("/v1/preview/training-jobs").json()["data"][0]["status"]
            asked.append((self.path, body["ProtectionEnabled"], status))
            self.send_response(
                200 if body["ProtectionEnabled"] else 500
            )  # an agent that fails stops no trainer
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Agent) as agent:
        threading.Thread(target=agent.serve_forever, daemon=True).start()
        monkeypatch.setenv("ECS_AGENT_URI", f"http://127.0.0.1:{agent.server_port}/api/1")
        groups = [{"trajectories": [rollout("maybe", 1.0), rollout("yes", 0.5)]}]
        body = {"model_id": model["id"], "trajectory_groups": groups}
        api.post("/v1/preview/training-jobs", json=body).raise_for_status()
        work_off()
        agent.shutdown()

    path = "/api/1/task-protection/v1/state"
    assert asked == [(path, True, "running"), (path, False, "succeeded")]


def test_the_reference_of_a_penalty_may_be_a_checkpoint_of_another_model(
    api: TestClient, model: dict[str, Any]
):
    other = api.post("/v1/preview/models", json=MODEL | {"name": "teacher"}).json()
    groups = [{"trajectories": [rollout("maybe", 1.0), rollout("yes", 0.5), rollout("no", 0.75)]}]
    rate = {"learning_rate": 0.003}
    body = {"trajectory_groups": groups, "experimental_config": rate}
    api.post("/v1/preview/training-jobs", json=body | {"model_id": other["id"]})
    work_off()
    penalty = {"kl_penalty_coef": 0.1, "kl_ref_adapter_path": "wandb-artifact:///acme/p/teacher"}
    taught = api.post(
        "/v1/preview/training-jobs",
        json={"model_id": model["id"], "trajectory_groups": groups, "experimental_config": rate | penalty},
    ).json()
    work_off()

    assert taught["experimental_config"]["kl_ref_adapter_path"] == "acme/p/teacher:step1"
    step = next(e["data"] for e in events(api, taught["id"]) if e["type"] == "gradient_step")
    assert step["kl_policy_ref"] < -1e-6 or step["kl_policy_ref"] > 1e-6
    again = [table.get(Job, taught["id"])]
    assert len({*work.replay(again[0])}) == 1
    deleted = api.delete(f"/v1/preview/models/{other['id']}")
    assert deleted.status_code == 200
    with pytest.raises(TrainingError, match="'acme/p/teacher:step1', which this job needs, was deleted"):
        work.replay(again[0])


def test_the_reference_of_a_penalty_may_be_a_step_of_the_model_itself(api: TestClient, model: dict[str, Any]):
    groups = [{"trajectories": [rollout("maybe", 1.0), rollout("yes", 0.5), rollout("no", 0.75)]}]

    def trained(**config: Any) -> dict[str, Any]:
        body = {"model_id": model["id"], "trajectory_groups": groups, "experimental_config": config}
        job = api.post("/v1/preview/training-jobs", json=body).raise_for_status().json()
        work_off()
        return next(event["data"] for event in events(api, job["id"]) if event["type"] == "gradient_step")

    for _ in range(2):
        trained(learning_rate=0.003)
    still = {
        "learning_rate": 0.0,
        "kl_penalty_coef": 0.1,
    }  # from here on every step has the weights of step 2

    first = trained(**still, kl_penalty_reference_step=1)["kl_policy_ref"]
    assert abs(first) > 1e-6
    assert trained(**still, kl_penalty_reference_step=2)["kl_policy_ref"] == pytest.approx(0, abs=1e-7)
    assert trained(**still, kl_penalty_step_lag=3)["kl_policy_ref"] == first
    base = trained(**still)["kl_policy_ref"]
    assert trained(**still, kl_penalty_step_lag=99)["kl_policy_ref"] == base != first


@pytest.mark.parametrize("name", ["scale_rewards", "normalize_advantages"])
def test_advantages_are_left_in_the_units_of_the_reward_on_demand(
    api: TestClient, model: dict[str, Any], name: str
):
    answers = ("maybe", "yes", "no")
    groups = [
        {"trajectories": [rollout(*each) for each in zip(answers, rewards, strict=True)]}
        for rewards in ((5.0, 1.0, 3.0), (1.2, 1.0, 1.1))
    ]
    for config in ({}, {name: False}):
        body = {"model_id": model["id"], "trajectory_groups": groups, "experimental_config": config}
        api.post("/v1/preview/training-jobs", json=body).raise_for_status()
    work_off()

    usual, unscaled = ([row["advantage"] for row in ledger_of(api, model, step)] for step in (1, 2))
    assert usual[0] == pytest.approx(usual[3], rel=1e-4)
    assert unscaled[0] == pytest.approx(20 * unscaled[3], rel=1e-4)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("acme/p/nobody:step1", "is no checkpoint of yours"),
        ("acme/p/agent", "is no checkpoint of yours"),
        ("rivals/p/agent:step1", "is no checkpoint of yours"),
        ("/etc/passwd", "paths are not taken"),
        ("s3://bucket/adapter", "paths are not taken"),
    ],
)
def test_a_reference_that_is_no_checkpoint_of_the_callers_is_refused(
    api: TestClient, model: dict[str, Any], path: str, told: str
):
    config = {"kl_penalty_coef": 0.1, "kl_ref_adapter_path": path}
    groups = [{"trajectories": [rollout("maybe", 1.0), rollout("yes", 0.5)]}]
    answer = api.post(
        "/v1/preview/training-jobs",
        json={"model_id": model["id"], "trajectory_groups": groups, "experimental_config": config},
    )

    assert answer.status_code == 422 and told in answer.json()["error"]["message"]
