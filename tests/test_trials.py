"""``validate_only``: every check and the counts of a job, with nothing queued and nothing kept."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest

from conftest import Stack
from tuneyard import blobs, trials
from tuneyard.errors import Unavailable

pytestmark = [pytest.mark.timeout(300)]
QUESTION = {"role": "user", "content": "Answer yes, no or maybe."}


def trajectory(answer: str, reward: float) -> dict[str, Any]:
    return {"messages_and_choices": [QUESTION, {"role": "assistant", "content": answer}], "reward": reward}


GROUPS = [
    {"trajectories": [trajectory("yes", 0.5), trajectory("maybe", 1.0)]},
    {"trajectories": [trajectory("no", 0.3), trajectory("no", 0.3)]},
    {"trajectories": [trajectory("yes", 0.0), {"messages_and_choices": [QUESTION], "reward": 1.0}]},
]


@pytest.fixture
def client(stack: Stack):
    headers = {"Authorization": f"Bearer {stack.api_key}"}
    with httpx.Client(base_url=stack.base_url, headers=headers, timeout=60) as client:
        yield client


@pytest.fixture
def model_id(client: httpx.Client, request: pytest.FixtureRequest) -> str:
    name = request.node.name.replace("_", "-").replace("[", "-").replace("]", "")
    body = {"project": "trials", "name": name, "base_model": "tuneyard/tiny"}
    return str(client.post("/v1/preview/models", json=body).raise_for_status().json()["id"])


def rl_job(model_id: str, **more: Any) -> dict[str, Any]:
    config = {"allow_training_without_logprobs": True}
    return {"model_id": model_id, "trajectory_groups": GROUPS, "experimental_config": config} | more


def upload(client: httpx.Client, *lines: dict[str, Any] | str) -> str:
    made = client.post("/v1/preview/uploads").raise_for_status().json()
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    httpx.put(made["upload_url"], content=text.encode()).raise_for_status()
    return str(made["url"])


def ended(client: httpx.Client, job_id: str) -> dict[str, Any]:
    until = time.monotonic() + 60
    while (job := client.get(f"/v1/preview/training-jobs/{job_id}").json())["finished_at"] is None:
        assert time.monotonic() < until
        time.sleep(0.1)
    return dict(job)


@pytest.mark.live
def test_the_counts_are_those_of_the_job_that_follows(client: httpx.Client, model_id: str):
    told = client.post("/v1/preview/training-jobs", json=rl_job(model_id, validate_only=True))
    assert told.status_code == 200, told.text
    assert client.get("/v1/preview/training-jobs", params={"model_id": model_id}).json()["data"] == []
    made = client.post("/v1/preview/training-jobs", json=rl_job(model_id)).json()
    job = ended(client, made["id"])

    counts = told.json()
    assert (counts["num_groups"], counts["num_trajectories"]) == (3, 6)
    assert counts["num_sequences"] == job["num_sequences"] == 1
    assert counts["num_trained_tokens"] == job["num_trained_tokens"] > 0
    assert counts["dropped"] == {"all rewards of the group are equal": 2, "no trainable tokens": 1}
    assert [(row["group"], row["index"]) for row in counts["dropped_rows"]] == [(1, 0), (1, 1), (2, 1)]
    events = client.get(f"/v1/preview/training-jobs/{job['id']}/events").json()["data"]
    assert next(e["data"]["dropped"] for e in events if e["type"] == "warning") == counts["dropped"]


@pytest.mark.live
def test_the_time_is_estimated_from_the_jobs_before(client: httpx.Client, model_id: str):
    ended(client, client.post("/v1/preview/training-jobs", json=rl_job(model_id)).json()["id"])
    told = client.post("/v1/preview/training-jobs", json=rl_job(model_id, validate_only=True)).json()

    assert told["estimated_from_jobs"] >= 1
    assert 0 < told["estimated_seconds"] < 60
    assert told["estimated_cost"] == 0


@pytest.mark.live
def test_a_file_is_read_to_its_last_line(client: httpx.Client, model_id: str):
    good = {"messages": [QUESTION, {"role": "assistant", "content": "maybe"}]}
    body = {"model_id": model_id, "validate_only": True}
    right = client.post(
        "/v1/preview/sft-training-jobs", json=body | {"training_data_url": upload(client, *[good] * 5)}
    )
    wrong = client.post(
        "/v1/preview/sft-training-jobs", json=body | {"training_data_url": upload(client, *[good] * 4, "{")}
    )

    assert right.status_code == 200, right.text
    assert (right.json()["num_lines"], right.json()["num_sequences"]) == (5, 3)
    assert wrong.status_code == 422 and "Line 5" in wrong.json()["error"]["message"]
    rates = {"config": {"learning_rate": [0.1, 0.2]}, "training_data_url": upload(client, *[good] * 5)}
    listed = client.post("/v1/preview/sft-training-jobs", json=body | rates)
    assert listed.status_code == 422 and "3 batches" in listed.json()["error"]["message"]


@pytest.mark.live
def test_a_reference_that_is_not_there_is_found(client: httpx.Client, model_id: str):
    config = {"kl_penalty_coef": 0.1, "kl_penalty_reference_step": 7}
    told = client.post(
        "/v1/preview/training-jobs",
        json=rl_job(model_id, experimental_config=config, validate_only=True),
    )

    assert told.status_code == 422 and "step 7" in told.json()["error"]["message"]


def test_nothing_is_left_when_the_service_is_away(api, monkeypatch: pytest.MonkeyPatch):
    made = api.post(
        "/v1/preview/models", json={"project": "trials", "name": "away", "base_model": "tuneyard/tiny"}
    )
    told = api.post("/v1/preview/training-jobs", json=rl_job(made.json()["id"], validate_only=True))

    assert told.status_code == Unavailable.status
    assert blobs.keys("trials/") == blobs.keys("inputs/") == []


def test_an_unknown_model_is_not_found(api):
    assert api.post("/v1/preview/training-jobs", json=rl_job("none", validate_only=True)).status_code == 404


def test_the_price_is_that_of_the_median_speed(monkeypatch: pytest.MonkeyPatch, api, caller):
    from tuneyard.records import Job, JobKind, JobStatus
    from tuneyard.settings import settings

    def job(trained: int, seconds: float) -> Job:
        return Job(
            id="j", team="acme", model_id="m", collection="c", base_model="b", kind=JobKind.RL,
            status=JobStatus.SUCCEEDED, config={}, experimental_config={}, input_key="k", created_at=0,
            created_by="ada", num_trained_tokens=trained, started_at=1000, finished_at=1000 + int(seconds * 1000),
        )  # fmt: skip

    done = [job(100, 1), job(100, 2), job(100, 10)]
    monkeypatch.setattr(trials.jobs, "page", lambda *_, **__: done)
    monkeypatch.setattr(settings(), "worker_hour_price", 36.0)

    told = trials._estimate(caller, job(0, 0), 1000)

    assert told == {"estimated_seconds": 20.0, "estimated_cost": 0.2, "estimated_from_jobs": 3}
