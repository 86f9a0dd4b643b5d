"""A worker dies at any call to AWS, before or after it took effect; another one makes the same bits and events."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import botocore.client
import pytest
from fastapi.testclient import TestClient

from test_trainer import rollout
from training_fixtures import one_thread  # noqa: F401  a fixture
from tuneyard import blobs, clock, leases, table
from tuneyard.records import Checkpoint, Job, JobStatus
from tuneyard.settings import settings
from tuneyard_host.training import adapters, progress, trainer

KILLS = int(os.environ.get("TUNEYARD_TEST_KILLS", "10"))
"""Deaths; fifty take two to four minutes."""
STEPS = "packed_sequence_length"


class Killed(BaseException):
    """The worker's end: nothing catches it."""


@contextmanager
def dying_at(call: int | None, *, after: bool) -> Iterator[list[str]]:
    """Die at the so-manieth call to AWS, before it is made or when its answer is lost; yields the calls made."""
    real, made = botocore.client.BaseClient._make_api_call, []

    def counted(self: Any, operation: str, parameters: dict[str, Any]) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return real(self, operation, parameters)
        made.append(operation)
        if len(made) == call and not after:
            raise Killed
        answer = real(self, operation, parameters)
        if len(made) == call:
            raise Killed
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.client.BaseClient, "_make_api_call", counted)
        yield made


def work(job_id: str, name: str) -> None:
    """One worker's life: it knows nothing of what others left in memory."""
    adapters._learners.clear()
    trainer._take(job_id, None, name=name, stop=threading.Event(), shard=False)


def outcome(api: TestClient, job_id: str) -> dict[str, Any]:
    """What must not depend on how often a worker died: the files, the events, the metrics."""
    job = table.get(Job, job_id)
    assert job is not None and job.status is JobStatus.SUCCEEDED, job
    checkpoint = table.get(Checkpoint, job.model_id, job.checkpoint_step)
    assert checkpoint is not None
    listed = api.get(f"/v1/preview/training-jobs/{job_id}/events", params={"limit": 100}).json()["data"]
    events = [(event["type"], event["data"]) for event in listed if event["type"] != "job_requeued"]
    for told in [data for _, data in events] + [checkpoint.metrics]:
        told.pop("tokens_per_second", None)
        told.pop("checkpoint_id", None)
    files = {file.name: file.sha256 for file in checkpoint.files}
    ledger = hashlib.sha256(blobs.get(checkpoint.prefix + "ledger.parquet")).hexdigest()
    assert files["ledger.parquet"] == ledger
    return {"files": files, "events": events, "metrics": checkpoint.metrics}


@pytest.fixture
def submit(api: TestClient, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same job, on a model of its own each time; its seed must not come from its id then."""
    monkeypatch.setattr("tuneyard_host.training.work._seed", lambda _: 7)
    monkeypatch.setenv("TUNEYARD_BUS_NAME", "test-events")  # moto's output of the stack has no name of it
    settings.cache_clear()
    groups = []
    for number in range(5):
        answers = [rollout("yes", 1.0, -0.4), rollout("maybe", 0.5, -2.0), rollout("no", 0.0)]
        for answer in answers:
            question = {"role": "user", "content": f"{number}. Answer yes, no or maybe."}
            answer["messages_and_choices"] = [question, *answer["messages_and_choices"][1:]]
        groups.append({"trajectories": answers})
    number = iter(range(1000))

    def one() -> str:
        model = {"project": "p", "name": f"resumed-{next(number)}", "base_model": "tuneyard/tiny"}
        made = api.post("/v1/preview/models", json=model).json()["id"]
        config = {STEPS: 48, "learning_rate": 3e-3, "precalculate_logprobs": True}
        body = {"model_id": made, "trajectory_groups": groups, "experimental_config": config}
        return str(api.post("/v1/preview/training-jobs", json=body).json()["id"])

    return one


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_at_random_moments_a_job_makes_the_same_bits(
    api: TestClient, submit: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(progress, "_SOONEST", 0.0)
    monkeypatch.setattr(progress, "_SHARE", 0)
    ahead, real = [0], clock.now_ms
    monkeypatch.setattr(clock, "now_ms", lambda: real() + ahead[0])
    for name in ("warming up", "undisturbed"):
        with dying_at(None, after=False) as calls:
            work(undisturbed := submit(), name)
    wanted = outcome(api, undisturbed)
    assert [kind for kind, _ in wanted["events"]].count("gradient_step") >= 3
    assert "TransactWriteItems" in calls and "PutObject" in calls

    moments = random.Random(3)
    resumed = 0
    for kill in range(KILLS):
        job_id = submit()
        moment, after = moments.randint(1, len(calls)), moments.random() < 0.5
        with dying_at(moment, after=after), pytest.raises(Killed):
            work(job_id, f"dead-{kill}")
        ahead[0] += 120_000
        leases.sweep()
        unfinished = table.get(Job, job_id).status is not JobStatus.SUCCEEDED
        resumed += unfinished
        work(job_id, f"heir-{kill}")
        found = outcome(api, job_id)
        assert found == wanted, f"killed {'after' if after else 'before'} call {moment}, {calls[moment - 1]}"
        assert not (unfinished and blobs.keys(blobs.progress_prefix(job_id)))
    assert resumed > KILLS / 2
