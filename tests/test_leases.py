"""Claims, leases and the sweep: whoever dies, a job ends once, in order, and the dead can change nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tuneyard import clock, leases, queues, sweeps
from tuneyard.leases import Lost, NotYet
from tuneyard.records import Job, JobStatus
from tuneyard_host.local import doors

JOBS = "/v1/preview/training-jobs"
GROUP = {"trajectories": [{"messages_and_choices": [{"role": "user", "content": "?"}], "reward": 1}]}


@pytest.fixture
def model_id(api: TestClient) -> str:
    return api.post(
        "/v1/preview/models", json={"project": "p", "name": "m", "base_model": "tuneyard/tiny"}
    ).json()["id"]


@pytest.fixture
def submit(api: TestClient, model_id: str) -> Callable[[], str]:
    """Queue one more job of the model."""
    rates = iter(range(1, 100))

    def one() -> str:
        body = {"model_id": model_id, "trajectory_groups": [GROUP]}
        return api.post(JOBS, json=body | {"experimental_config": {"learning_rate": next(rates)}}).json()[
            "id"
        ]

    return one


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Move the clock forward by seconds."""
    ahead = [0]
    real = clock.now_ms
    monkeypatch.setattr(clock, "now_ms", lambda: real() + ahead[0])

    def move(seconds: float) -> None:
        ahead[0] += round(seconds * 1000)

    return move


def claimed(job_id: str, worker: str = "one") -> Job:
    job = leases.claim(job_id, worker=worker)
    assert job is not None
    return job


def drain() -> list[str]:
    """The jobs whose messages wait in the queue."""
    found = []
    while message := queues.receive_job(wait_seconds=0, visible_after=1):
        found.append(message.job_id)
        queues.delete(message)
    return found


def commit(job: Job) -> None:
    leases.commit(job, step=1, files={"adapter_model.safetensors": b"x"}, metrics={"loss": 1.0}, lineage={})


def test_jobs_of_a_model_are_claimed_in_the_order_of_their_creation(submit: Callable[[], str]):
    first, second = submit(), submit()

    with pytest.raises(NotYet):
        leases.claim(second, worker="one")
    job = claimed(first)
    with pytest.raises(NotYet):
        leases.claim(second, worker="two")
    leases.fail(job, "no")
    assert claimed(second).id == second


def test_a_final_or_unknown_job_is_claimed_by_nobody(api: TestClient, submit: Callable[[], str]):
    job_id = submit()
    api.post(f"{JOBS}/{job_id}/cancel")

    assert leases.claim(job_id, worker="one") is None
    assert leases.claim("no-such-job", worker="one") is None


def test_a_queued_job_whose_message_was_lost_is_rung_for_again(
    submit: Callable[[], str], later: Callable[[float], None]
):
    job_id = submit()
    assert drain() == [job_id]

    sweeps.sweep()
    assert drain() == []
    later(61)
    sweeps.sweep()
    assert drain() == [job_id]


def test_a_sweep_tells_how_many_models_are_at_work_and_how_many_workers_were_gone(
    submit: Callable[[], str], later: Callable[[float], None], capsys: pytest.CaptureFixture[str]
):
    claimed(submit())
    submit()
    told = []
    for seconds in (0, 61):
        later(seconds)
        doors.modules()["sweep"].handler({}, None)
        metrics = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        told.append({name: metric[name] for metric in metrics for name in metric if name != "_aws"})

    assert told == [
        {"models_at_work": [1.0], "leases_expired": [0.0]},
        {"models_at_work": [1.0], "leases_expired": [1.0]},
    ]


def test_a_worker_that_falls_silent_loses_its_job_and_can_change_nothing(
    api: TestClient, submit: Callable[[], str], later: Callable[[float], None]
):
    job_id = submit()
    dead = leases.report(claimed(job_id), "training_started", {"num_sequences": 3}, num_sequences=3)
    drain()

    later(61)
    sweeps.sweep()

    assert drain() == [job_id]
    heir = claimed(job_id, worker="two")
    for write in (
        leases.renew,
        commit,
        lambda job: leases.report(job, "gradient_step", {}),
        lambda job: leases.fail(job, "x"),
    ):
        with pytest.raises(Lost):
            write(dead)
    assert heir.progress == 1
    commit(leases.report(heir, "gradient_step", {"loss": 1.0}, steps_done=1))
    told = api.get(f"{JOBS}/{job_id}/events").json()["data"]
    assert [event["type"] for event in told] == [
        "training_started", "job_requeued", "gradient_step", "training_ended",
    ]  # fmt: skip


def test_a_lease_that_is_renewed_is_not_taken_back(submit: Callable[[], str], later: Callable[[float], None]):
    job = claimed(submit())
    drain()

    for _ in range(3):
        later(40)
        leases.renew(job)
        sweeps.sweep()

    assert drain() == []
    with pytest.raises(NotYet):
        leases.claim(job.id, worker="two")


def test_a_worker_of_the_same_name_takes_its_own_job_back_at_once(submit: Callable[[], str]):
    job = claimed(submit(), worker="local-0")

    assert [left.id for left in leases.left_behind("local-0")] == [job.id]
    again = claimed(job.id, worker="local-0")

    assert again.lease != job.lease
    with pytest.raises(Lost):
        leases.renew(job)


def test_a_job_that_kills_three_workers_fails_and_lets_the_next_one_run(
    api: TestClient, submit: Callable[[], str], later: Callable[[float], None]
):
    deadly, next_one = submit(), submit()
    for worker in ("one", "two", "three"):
        claimed(deadly, worker=worker)
        later(61)
        sweeps.sweep()

    seen = api.get(f"{JOBS}/{deadly}").json()
    assert seen["status"] == "failed"
    assert "3 workers in a row" in seen["error_message"]
    assert api.get(f"{JOBS}/{deadly}/events").json()["data"][-1]["type"] == "training_failed"
    assert claimed(next_one).id == next_one


def test_progress_forgives_earlier_deaths(submit: Callable[[], str], later: Callable[[float], None]):
    job_id = submit()
    for worker in ("one", "two", "three", "four", "five"):
        leases.report(claimed(job_id, worker=worker), "gradient_step", {"loss": 1.0})
        later(61)
        sweeps.sweep()

    assert claimed(job_id, worker="six").status is JobStatus.RUNNING


def test_a_job_given_back_is_queued_with_its_message(submit: Callable[[], str]):
    job = claimed(submit())
    drain()

    leases.release(job)

    assert drain() == [job.id]
    assert claimed(job.id, worker="two").deaths == 0


@pytest.mark.parametrize("how", ["cancel", "delete the model"])
def test_a_running_job_that_is_ended_from_outside_makes_no_checkpoint(
    api: TestClient, submit: Callable[[], str], model_id: str, how: str
):
    job = claimed(submit())

    if how == "cancel":
        assert api.post(f"{JOBS}/{job.id}/cancel").json()["status"] == "cancelled"
    else:
        assert api.delete(f"/v1/preview/models/{model_id}").status_code == 200

    with pytest.raises(Lost):
        commit(job)
    seen: dict[str, Any] = api.get(f"{JOBS}/{job.id}").json()
    assert (seen["status"], seen["checkpoint_step"]) == ("cancelled", None)
    assert api.get(f"{JOBS}/{job.id}/events").json()["data"][-1]["type"] == "training_failed"
    assert api.post(f"{JOBS}/{job.id}/cancel").json()["status"] == "cancelled"


def test_a_checkpoint_is_committed_once(api: TestClient, submit: Callable[[], str], model_id: str):
    job = claimed(submit())
    commit(job)

    with pytest.raises(Lost):
        commit(job)
    assert [c["step"] for c in api.get(f"/v1/preview/models/{model_id}/checkpoints").json()["data"]] == [1]
    assert api.post(f"{JOBS}/{job.id}/cancel").status_code == 409


def test_a_deleted_step_is_never_used_again(api: TestClient, submit: Callable[[], str], model_id: str):
    commit(claimed(submit()))
    path = f"/v1/preview/models/{model_id}/checkpoints"

    assert api.request("DELETE", path, json={"steps": [1, 1, 5]}).json() == {
        "deleted_count": 1,
        "not_found_steps": [5],
    }

    assert api.get(path).json()["data"] == []
    assert api.get(f"/v1/preview/models/{model_id}").json()["last_step"] == 1
