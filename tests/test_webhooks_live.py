"""From a training job's new checkpoint to the customer's endpoint, on the live local stack and nothing but its API."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import boto3
import httpx
import psutil
import pytest
from standardwebhooks import Webhook as Verifier
from standardwebhooks import WebhookVerificationError

from webhook_fixtures import Received, Receiver, answer, drip, receiving

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
MANY = int(os.environ.get("TUNEYARD_TEST_AUTOMATIONS", "300"))
"""Automations on one event; a thousand take four minutes."""
ASK = [{"role": "user", "content": "Answer yes, no or maybe."}]
DISPATCH = {
    "event_type": "model-trained",
    "client_payload": {
        "event_author": "${event_author}",
        "artifact_version": "${artifact_version}",
        "artifact_version_string": "${artifact_version_string}",
        "artifact_collection_name": "${artifact_collection_name}",
        "project_name": "${project_name}",
        "entity_name": "${entity_name}",
    },
}
SLACK = {"text": "*${event_author}* trained <${artifact_version}|${artifact_version_string}> :rocket: $5"}


class Customer:
    """A team on a live stack, by its administrator's key, with a project and secrets of its own."""

    def __init__(self, http: httpx.Client, team: str, receiver: Receiver) -> None:
        self.http, self.team, self.receiver = http, team, receiver
        self.project = f"hooks-{uuid.uuid4().hex[:8]}"
        self.secrets = {
            name: self.put(f"/v1/teams/{team}/secrets/{name}", {"value": value})["standard_webhooks_secret"]
            for name, value in (("SIGNING", "hush hush"), ("GITHUB_TOKEN", "ghp_secret"))
        }

    def post(self, path: str, body: Any) -> dict[str, Any]:
        return self._ok(self.http.post(path, json=body))

    def put(self, path: str, body: Any = None) -> dict[str, Any]:
        return self._ok(self.http.put(path, json=body))

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        return self._ok(self.http.get(path, params=query))

    def webhook(self, url: str, **secrets: str) -> str:
        return str(self.post(f"/v1/teams/{self.team}/webhooks", {"name": "hook", "url": url} | secrets)["id"])

    def automation(self, webhook: str, event: str, **fields: Any) -> str:
        scope = {"type": "project", "entity": self.team, "project": self.project}
        known = {"name": "a", "team": self.team, "scope": scope, "event": event, "webhook_id": webhook}
        return str(self.post("/v1/automations", known | fields)["id"])

    def listens(self, path: str, event: str, payload: Any = None, **fields: Any) -> str:
        """A webhook of this path of the receiver, signed and with a token, and its automation's id."""
        hook = self.webhook(self.receiver.url(path), secret="SIGNING", access_token="GITHUB_TOKEN")
        return self.automation(hook, event, payload=payload and json.dumps(payload), **fields)

    def trained(self) -> dict[str, Any]:
        """A model, and the job that made its first checkpoint."""
        body = {"project": self.project, "name": "agent", "base_model": "tuneyard/tiny"}
        model = self.post("/v1/preview/models", body)
        request = {"model": f"wandb-artifact:///{self.team}/{self.project}/agent", "messages": ASK, "n": 4}
        request |= {"logprobs": True, "return_token_ids": True, "return_tokens_as_token_ids": True}
        choices = self.post("/v1/chat/completions", request | {"max_tokens": 8})["choices"]
        rollouts = [{"messages_and_choices": [*ASK, one], "reward": n} for n, one in enumerate(choices)]
        job = self.post(
            "/v1/preview/training-jobs",
            {"model_id": model["id"], "trajectory_groups": [{"trajectories": rollouts}]},
        )
        until(lambda: self.get(f"/v1/preview/training-jobs/{job['id']}")["status"] == "succeeded")
        return model

    def every(self, path: str) -> list[dict[str, Any]]:
        """All pages of a list."""
        page = self.get(path, limit=100)
        found = list(page["data"])
        while page["has_more"]:
            page = self.get(path, limit=100, after=page["last_id"])
            found += page["data"]
        return found

    def arrived(self, path: str, many: int = 1) -> list[Received]:
        until(lambda: len(self.receiver.at(path)) >= many)
        return self.receiver.at(path)

    @staticmethod
    def _ok(answered: httpx.Response) -> dict[str, Any]:
        assert answered.status_code == 200, answered.text
        return dict(answered.json())


def until(true: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.1)


def kill_sender(stack: Any) -> None:
    """Kill the sender's process with whatever it has in hand; the stack starts another."""
    for child in psutil.Process(stack.pid).children():
        with suppress(psutil.Error):
            if "sender" in child.cmdline():
                child.kill()


@pytest.fixture
def customer(stack: Any) -> Iterator[Customer]:
    """A team's administrator with an endpoint on this machine."""
    headers = {"Authorization": f"Bearer {stack.api_key}"}
    with receiving() as one, httpx.Client(base_url=stack.base_url, headers=headers, timeout=60) as http:
        yield Customer(http, stack.team, one)


def test_a_new_checkpoint_reaches_github_slack_and_a_signed_endpoint(customer: Customer):
    github = customer.listens("/dispatches", "ADD_ARTIFACT_ALIAS", DISPATCH, alias_regex="^step")
    customer.listens("/slack", "ADD_ARTIFACT_ALIAS", SLACK, alias_regex="^latest$")
    customer.listens("/plain", "ADD_ARTIFACT_ALIAS", alias_regex="^step1$")
    customer.listens("/elsewhere", "ADD_ARTIFACT_ALIAS", alias_regex="^production$")
    customer.listens("/state", "RUN_STATE", run_states=["finished"], run_name_regex="^agent$")
    step = {"name": "gradient_step/loss", "comparison": "<", "threshold": 1e9}
    customer.listens("/metric", "RUN_METRIC", metric=step)
    customer.receiver.on("/dispatches", answer(503), answer(204))

    model = customer.trained()

    first, second = customer.arrived("/dispatches", 2)
    assert first.headers["webhook-id"] == second.headers["webhook-id"] and first.body == second.body
    assert [one.headers["x-service-attempt"] for one in (first, second)] == ["1", "2"]
    collection = f"{customer.team}/{customer.project}/agent"
    assert json.loads(second.body) == {
        "event_type": "model-trained",
        "client_payload": {
            "event_author": "local",
            "artifact_version": f"wandb-artifact:///{collection}:step1",
            "artifact_version_string": f"{collection}:step1",
            "artifact_collection_name": "agent",
            "project_name": customer.project,
            "entity_name": customer.team,
        },
    }
    (slack,), (plain,) = customer.arrived("/slack"), customer.arrived("/plain")
    link = f"<wandb-artifact:///{collection}:step1|{collection}:latest>"
    assert json.loads(slack.body) == {"text": f"*local* trained {link} :rocket: $5"}
    told = json.loads(plain.body)
    assert told["type"] == "ADD_ARTIFACT_ALIAS" and told["data"]["model_id"] == model["id"]
    assert json.loads(customer.arrived("/state")[0].body)["data"]["run_id"] == model["run_id"]
    assert json.loads(customer.arrived("/metric")[0].body)["data"]["metric_name"] == "gradient_step/loss"

    for got in (
        first,
        second,
        slack,
        plain,
        *customer.receiver.at("/state"),
        *customer.receiver.at("/metric"),
    ):
        assert Verifier(customer.secrets["SIGNING"]).verify(got.body, got.headers) == json.loads(got.body)
        expected = hmac.new(b"hush hush", got.body, hashlib.sha256).hexdigest()
        assert got.headers["x-service-signature"] == expected
        assert got.headers["authorization"] == "Bearer ghp_secret"
        assert got.headers["content-type"] == "application/json"
        with pytest.raises(WebhookVerificationError):
            Verifier(customer.secrets["SIGNING"]).verify(got.body + b" ", got.headers)
    time.sleep(3)
    assert customer.receiver.at("/elsewhere") == []
    for path in ("/slack", "/plain", "/state", "/metric"):
        assert len(customer.receiver.at(path)) == 1, path
    (row,) = customer.get(f"/v1/automations/{github}/executions")["data"]
    assert (row["status"], row["attempt_count"], row["status_code"]) == ("succeeded", 2, 204)
    hook = customer.get(f"/v1/teams/{customer.team}/webhooks/{row['webhook_id']}/deliveries")["data"]
    assert [one["id"] for one in hook] == [row["id"]] == [second.headers["webhook-id"]]


def test_an_endpoint_that_never_answers_delays_nobody_and_a_killed_sender_loses_nothing(
    customer: Customer, stack: Any
):
    customer.listens("/dead", "ADD_ARTIFACT_TAG")
    healthy = customer.listens("/healthy", "ADD_ARTIFACT_TAG")
    customer.receiver.always("/dead", drip(b"", every=1))
    data = f"/v1/projects/{customer.team}/{customer.project}/collections/data/versions"
    customer.post(data, {})
    for number in range(30):
        customer.put(f"{data}/0/tags/before-{number}")
    began = time.monotonic()
    customer.arrived("/healthy", 30)
    assert time.monotonic() - began < 15

    kill_sender(stack)
    for number in range(5):
        customer.put(f"{data}/0/tags/after-{number}")

    def statuses() -> list[str]:
        page = customer.get(f"/v1/automations/{healthy}/executions", limit=100)
        return [row["status"] for row in page["data"]]

    until(lambda: statuses() == ["succeeded"] * 35, seconds=240)
    assert len({got.headers["webhook-id"] for got in customer.receiver.at("/healthy")}) == 35


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_automations_on_one_event_are_as_many_deliveries_whoever_is_killed(
    customer: Customer, stack: Any
):
    hooks = [customer.webhook(customer.receiver.url(f"/{number}"), secret="SIGNING") for number in range(20)]
    made = {customer.automation(hooks[n % 20], "ADD_ARTIFACT_TAG", tag_regex="^go$") for n in range(MANY)}
    data = f"/v1/projects/{customer.team}/{customer.project}/collections/data/versions"
    customer.post(data, {})

    customer.put(f"{data}/0/tags/go")
    until(lambda: bool(customer.receiver.received))
    first = customer.get(f"/v1/deliveries/{customer.receiver.received[0].headers['webhook-id']}")
    for _ in range(3):
        publish_again(stack, first["event"])
        kill_sender(stack)
        time.sleep(4)

    rows: list[dict[str, Any]] = []

    def finished() -> bool:
        rows[:] = [
            row
            for hook in hooks
            for row in customer.every(f"/v1/teams/{customer.team}/webhooks/{hook}/deliveries")
        ]
        return len(rows) >= MANY and {row["status"] for row in rows} == {"succeeded"}

    until(finished, seconds=300)
    assert {row["automation_id"] for row in rows} == made and len(rows) == MANY
    times = Counter(got.headers["webhook-id"] for got in customer.receiver.received)
    assert set(times) == {row["id"] for row in rows}
    for id in (id for id, many in times.items() if many > 1):
        outcomes = [one["outcome"] for one in customer.get(f"/v1/deliveries/{id}")["attempts"]]
        assert times[id] <= len(outcomes) == outcomes.count("unknown") + 1


def publish_again(stack: Any, event: dict[str, str]) -> None:
    """Put an event on the bus once more, as EventBridge may by itself."""
    known = json.loads((stack.state / "environment.json").read_text())
    bus = boto3.client(
        "events",
        endpoint_url=known["AWS_ENDPOINT_URL"],
        region_name=known["AWS_REGION"],
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    detail = {"Source": "tuneyard", "DetailType": event["type"], "Detail": json.dumps({"id": event["id"]})}
    told = bus.put_events(Entries=[detail | {"EventBusName": known["TUNEYARD_BUS_NAME"]}])
    assert told["FailedEntryCount"] == 0
