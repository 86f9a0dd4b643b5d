"""From POST to the first gradient step, and from the last step to a checkpoint that can be used, on a warm stack."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from measuring import Result, stack

ROUNDS, JOBS = 3, 10
ASK = [{"role": "user", "content": "Answer yes, no or maybe."}]


def measure() -> list[Result]:
    """Seconds, the median of ten jobs after two that warm the trainer up; then jobs of two tenants in turns."""
    waits, commits, wholes, tokens = [], [], [], 0.0
    with stack() as (client, _, state):
        body = {"project": "bench", "name": "m", "base_model": "tuneyard/tiny"}
        model = client.post("/v1/preview/models", json=body).json()
        for number in range(12):
            request = {"model": model["inference_name"], "messages": ASK, "n": 16, "max_tokens": 8}
            choices = client.post("/v1/chat/completions", json=request).json()["choices"]
            groups = [
                {
                    "trajectories": [
                        {"messages_and_choices": [*ASK, c], "reward": n % 3} for n, c in enumerate(choices)
                    ]
                }
            ]
            began = time.time()
            job = client.post(
                "/v1/preview/training-jobs",
                json={"model_id": model["id"], "trajectory_groups": groups, "experimental_config": {}},
            ).json()
            events = _to_the_end(client, job["id"])
            wholes_end = time.time()
            steps = [_seconds(event) for event in events if event["type"] == "gradient_step"]
            if number >= 2:
                waits.append(steps[0] - began)
                commits.append(_seconds(events[-1]) - steps[-1])
                wholes.append(wholes_end - began)
                tokens = [e["data"]["tokens_per_second"] for e in events if e["type"] == "gradient_step"][-1]
        alone, both = _tenants(client, state, groups)
    return [
        Result("submit to first gradient step", f"{statistics.median(waits):.3f} s", goal="<= 1 s"),
        Result(
            "last gradient step to committed checkpoint",
            f"{statistics.median(commits):.3f} s",
            goal="<= 0.5 s",
        ),
        Result("submit to training_ended seen by the client", f"{statistics.median(wholes):.3f} s"),
        Result("tokens per second of the last step", f"{tokens:.0f}"),
        Result.of("jobs a second: two tenants in turns, against one alone", both, alone, "/s", ">= 0.9"),
    ]


def _tenants(client: httpx.Client, state: Path, groups: list[dict[str, Any]]) -> tuple[float, float]:
    """Jobs a second of one tenant alone, and of two whose jobs come in turns, on the one warm trainer."""
    key = [sys.executable, "-m", "tuneyard_host.cli", "keys", "create", "--team", "other", "--user", "bench"]
    made = subprocess.run([*key, "--state", str(state)], capture_output=True, text=True, check=True)
    headers = {"Authorization": f"Bearer {made.stdout.strip()}"}
    with httpx.Client(base_url=client.base_url, headers=headers, timeout=60) as other:
        body = {"project": "bench", "name": "tenants", "base_model": "tuneyard/tiny"}
        tenants = [(who, who.post("/v1/preview/models", json=body).json()["id"]) for who in (client, other)]
        alone, both = [], []
        for number in range(ROUNDS + 1):
            for found, order in ((alone, [tenants[0]] * JOBS), (both, tenants * (JOBS // 2))):
                rate = _rate(order, groups, learning_rate=1e-5 * (number + 1))
                found += [rate] if number else []
    return statistics.median(alone), statistics.median(both)


def _rate(
    order: list[tuple[httpx.Client, str]], groups: list[dict[str, Any]], *, learning_rate: float
) -> float:
    began, made = time.time(), []
    for place, (who, model) in enumerate(order):
        config = {"learning_rate": learning_rate * (1 + place / 100)}
        body = {"model_id": model, "trajectory_groups": groups, "experimental_config": config}
        made.append((who, who.post("/v1/preview/training-jobs", json=body).raise_for_status().json()["id"]))
    for who, job in made:
        _to_the_end(who, job)
    return len(order) / (time.time() - began)


def _to_the_end(client: Any, job_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while not found or found[-1]["type"] not in ("training_ended", "training_failed"):
        query = {"after": found[-1]["id"]} if found else {}
        found += client.get(f"/v1/preview/training-jobs/{job_id}/events", params=query).json()["data"]
    assert found[-1]["type"] == "training_ended", found[-1]
    return found


def _seconds(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["created_at"]).timestamp()
