"""Workers die at any moment, and nothing is lost, doubled or left hanging."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(900)]
ASK = [{"role": "user", "content": "Answer yes, no or maybe."}]
MODELS, JOBS, KILLS = 3, 3, 20


@pytest.fixture
def http(stack: Any) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {stack.api_key}"}
    with httpx.Client(base_url=stack.base_url, headers=headers, timeout=60) as client:
        yield client


def trainer_of(stack: Any) -> psutil.Process | None:
    """The stack's trainer, when there is one now."""
    with suppress(psutil.Error):
        for process in psutil.Process(stack.pid).children(recursive=True):
            if "trainer" in process.cmdline():
                return process
    return None


def rollouts(http: httpx.Client) -> list[dict[str, Any]]:
    """Groups with nothing in common, whose packed rows make a job of many steps."""
    request = {"model": "tuneyard/tiny", "messages": ASK, "n": 4, "max_tokens": 12, "ignore_eos": True}
    request |= {"logprobs": True, "return_token_ids": True, "return_tokens_as_token_ids": True}
    choices = http.post("/v1/chat/completions", json=request).json()["choices"]
    groups = []
    for number in range(24):
        prompt = {"role": "user", "content": f"{number}. Answer yes, no or maybe."}
        rewarded = [
            {"messages_and_choices": [prompt, choice], "reward": n % 3} for n, choice in enumerate(choices)
        ]
        groups.append({"trajectories": rewarded})
    return groups


def submit(http: httpx.Client, groups: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Several jobs on each of several models: the ids of the jobs by model, in order."""
    made: dict[str, list[str]] = {}
    for _ in range(MODELS):
        body = {"project": "kills", "name": uuid.uuid4().hex, "base_model": "tuneyard/tiny"}
        model = http.post("/v1/preview/models", json=body).json()["id"]
        made[model] = []
        for job in range(JOBS):
            config = {"packed_sequence_length": 64, "learning_rate": 1e-4 * (job + 1)}
            body = {"model_id": model, "trajectory_groups": groups, "experimental_config": config}
            made[model].append(http.post("/v1/preview/training-jobs", json=body).json()["id"])
    return made


def all_events(http: httpx.Client, job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while True:
        query = {"limit": 100, "wait": 0} | ({"after": found[-1]["id"]} if found else {})
        page = http.get(f"/v1/preview/training-jobs/{job}/events", params=query).json()
        found += page["data"]
        if not page["has_more"]:
            return found


def statuses(http: httpx.Client, made: dict[str, list[str]]) -> list[str]:
    return [
        http.get(f"/v1/preview/training-jobs/{job}").json()["status"]
        for jobs in made.values()
        for job in jobs
    ]


def test_a_trainer_killed_at_twenty_random_moments_loses_and_doubles_nothing(stack: Any, http: httpx.Client):
    groups, moments = rollouts(http), random.Random(7)
    made, last = submit(http, groups), None
    for _ in range(KILLS):
        while (worker := trainer_of(stack)) is None or worker.pid == last:
            time.sleep(0.05)
        time.sleep(moments.uniform(0.0, 6.0))
        worker.kill()
        last = worker.pid
        if set(statuses(http, made)) == {"succeeded"}:
            made |= submit(http, groups)

    until = time.monotonic() + 300
    while set(statuses(http, made)) & {"queued", "running"} and time.monotonic() < until:
        time.sleep(0.5)

    for model, jobs in made.items():
        for job in jobs:
            seen = http.get(f"/v1/preview/training-jobs/{job}").json()
            assert seen["status"] == "succeeded", seen
            told = [event for event in all_events(http, job) if event["type"] != "job_requeued"]
            steps = told[0]["data"]["num_sequences"]
            assert [e["type"] for e in told] == [
                "training_started",
                *["gradient_step"] * steps,
                "training_ended",
            ]
            assert steps > 10
        checkpoints = http.get(f"/v1/preview/models/{model}/checkpoints").json()["data"]
        assert [c["step"] for c in checkpoints] == list(range(1, len(jobs) + 1))
        assert [c["job_id"] for c in checkpoints] == jobs
