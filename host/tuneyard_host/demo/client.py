"""The training API in the few calls that the demo needs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import httpx

Message = dict[str, Any]


class ApiFailed(Exception):
    """The API answered with an error; the text is its sentence."""


class Client:
    """A training API, spoken to with one key."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._http = httpx.Client(
            base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}, timeout=httpx.Timeout(600, connect=10),
            limits=httpx.Limits(max_connections=32), trust_env=False,
        )  # fmt: skip
        self._pool = ThreadPoolExecutor(16)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._http.close()

    def create_model(self, project: str, name: str) -> tuple[str, str]:
        """Make a model on ``tuneyard/tiny``; its id, and the name under which it chats."""
        model = self._post(
            "/v1/preview/models", {"project": project, "name": name, "base_model": "tuneyard/tiny"}
        )
        return model["id"], f"wandb-artifact:///{model['entity']}/{model['project']}/{model['name']}"

    def chat(self, model: str, messages: list[Message], **options: Any) -> list[dict[str, Any]]:
        """The choices of one chat completion."""
        answer = self._post("/v1/chat/completions", {"model": model, "messages": messages, **options})
        return list(answer["choices"])

    def chats(self, model: str, prompts: list[list[Message]], **options: Any) -> list[list[dict[str, Any]]]:
        """The choices of several chat completions, asked side by side."""
        return list(self._pool.map(lambda messages: self.chat(model, messages, **options), prompts))

    def train(self, model_id: str, groups: list[dict[str, Any]], config: dict[str, Any]) -> str:
        """Queue a reinforcement-learning job; its id."""
        body = {"model_id": model_id, "trajectory_groups": groups, "experimental_config": config}
        return str(self._post("/v1/preview/training-jobs", body)["id"])

    def fine_tune(self, model_id: str, url: str, config: dict[str, Any]) -> str:
        """Queue a supervised job on an uploaded file; its id."""
        body = {"model_id": model_id, "training_data_url": url, "config": config}
        return str(self._post("/v1/preview/sft-training-jobs", body)["id"])

    def upload(self, lines: list[dict[str, Any]]) -> str:
        """Upload JSON lines; the URL under which a job may name them."""
        ticket = self._post("/v1/preview/uploads", {})
        body = "".join(json.dumps(line) + "\n" for line in lines)
        answer = httpx.put(ticket["upload_url"], content=body, timeout=60, trust_env=False)
        answer.raise_for_status()
        return str(ticket["url"])

    def events(self, job_id: str) -> Iterator[dict[str, Any]]:
        """The job's events as they come, up to its last; ApiFailed when the job fails."""
        after: dict[str, str] = {}
        while True:
            page = self._get(f"/v1/preview/training-jobs/{job_id}/events", {"limit": "100", **after})
            for event in page["data"]:
                after = {"after": event["id"]}
                if event["type"] == "training_failed":
                    raise ApiFailed(f"The job {job_id} failed: {event['data']['error_message']}")
                yield event
                if event["type"] == "training_ended":
                    return

    def _post(self, path: str, body: Any) -> dict[str, Any]:
        return _read(self._http.post(path, json=body))

    def _get(self, path: str, query: dict[str, str]) -> dict[str, Any]:
        return _read(self._http.get(path, params=query))


def _read(answer: httpx.Response) -> dict[str, Any]:
    if answer.is_error:
        try:
            told = answer.json()["error"]["message"]
        except (ValueError, KeyError):
            told = answer.text[:200]
        raise ApiFailed(
            f"{answer.request.method} {answer.request.url.path} answered {answer.status_code}: {told}"
        )
    return dict(answer.json())
