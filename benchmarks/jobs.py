"""From POST to the first gradient step, and from the last step to a checkpoint that can be used, on a warm stack."""

from __future__ import annotations

import statistics
import time
from datetime import datetime
from typing import Any

from measuring import Result, stack

ASK = [{"role": "user", "content": "Answer yes, no or maybe."}]


def measure() -> list[Result]:
    """Seconds, the median of ten jobs after two that warm the trainer up."""
    waits, commits, wholes, tokens = [], [], [], 0.0
    with stack() as (client, _, _):
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
    return [
        Result("submit to first gradient step", f"{statistics.median(waits):.3f} s", goal="<= 1 s"),
        Result(
            "last gradient step to committed checkpoint",
            f"{statistics.median(commits):.3f} s",
            goal="<= 0.5 s",
        ),
        Result("submit to training_ended seen by the client", f"{statistics.median(wholes):.3f} s"),
        Result("tokens per second of the last step", f"{tokens:.0f}"),
    ]


def _to_the_end(client: Any, job_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while not found or found[-1]["type"] not in ("training_ended", "training_failed"):
        query = {"after": found[-1]["id"]} if found else {}
        found += client.get(f"/v1/preview/training-jobs/{job_id}/events", params=query).json()["data"]
    assert found[-1]["type"] == "training_ended", found[-1]
    return found


def _seconds(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["created_at"]).timestamp()
