"""Webhooks and automations: made, checked when they are saved, tested, and fired by what they listen to."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from standardwebhooks import Webhook as Verifier

from conftest import ROOT
from tuneyard import teams
from tuneyard.records import EventType, Role
from tuneyard.settings import settings
from tuneyard_host import catalogue
from webhook_fixtures import (  # noqa: F401
    Office,
    Receiver,
    answer,
    authority,
    configured,
    drip,
    office,
    receiver,
    receiving,
    reset,
)

PROJECT = {"type": "project", "entity": "acme", "project": "p"}
REGISTRY = {"type": "registry", "registry": "r"}
METRIC = {"name": "val/reward", "aggregate": "avg", "window": 3, "comparison": ">=", "threshold": 0.75}
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "yes"}, "logprobs": None}
GROUP = {"trajectories": [{"messages_and_choices": [{"role": "user", "content": "?"}, CHOICE], "reward": 1}]}
RUN = "/v1/projects/acme/p/runs/agent/metrics"


@pytest.fixture
def model(api: TestClient) -> str:
    """The id of a model named ``agent``."""
    return str(
        api.post(
            "/v1/preview/models", json={"project": "p", "name": "agent", "base_model": "tuneyard/tiny"}
        ).json()["id"]
    )


def automation(webhook: str, **fields: Any) -> dict[str, Any]:
    """The body of an automation."""
    known = {"name": "a", "team": "acme", "scope": PROJECT, "event": "LINK_ARTIFACT", "webhook_id": webhook}
    return known | fields


def test_a_webhook_is_made_changed_and_deleted(office: Office, receiver: Receiver, api: TestClient):
    office.secret("T", "t")
    hook = f"/v1/teams/acme/webhooks/{office.webhook(receiver.url(), access_token='T')}"
    shown = api.get(hook).json()
    assert (shown["name"], shown["access_token"], shown["secret"], shown["enabled"]) == (
        "hook",
        "T",
        None,
        True,
    )

    changed = api.patch(hook, json={"name": "other", "access_token": None}).json()
    assert (changed["name"], changed["access_token"], changed["url"]) == ("other", None, receiver.url())
    assert api.patch(hook, json={"colour": "red"}).status_code == 422
    made = api.post("/v1/automations", json=automation(shown["id"])).json()
    assert api.delete(hook).status_code == 409
    assert api.delete(f"/v1/automations/{made['id']}").status_code == 200
    assert api.delete(hook).status_code == 200
    assert api.get(hook).status_code == 404


@pytest.mark.parametrize(
    "change",
    [
        {"url": "http://example.com/"}, {"url": "https://169.254.169.254/"}, {"url": "https://localhost/"}, {"url": ""},
        {"url": "https://u:p@example.com/"}, {"url": "https://example.com:22/"}, {"url": "https://example.com/\r\n"},
        {"url": "file:///etc/passwd"}, {"url": "https://testserver.example/"}, {"name": ""}, {"name": "x" * 129},
        {"secret": "NOPE"}, {"access_token": "NOPE"}, {"colour": "red"}, {"url": None}, {"secret": ["S"]},
    ],
)  # fmt: skip
def test_a_webhook_that_cannot_be_is_422(office: Office, api: TestClient, change: dict[str, Any]):
    body = {"name": "n", "url": "https://example.com/hook"} | change

    answered = api.post("/v1/teams/acme/webhooks", json=body, headers={"Host": "testserver.example"})

    assert answered.status_code == 422, answered.text


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"event": "ADD_ARTIFACT_ALIAS"}, "alias_regex is required"),
        ({"event": "ADD_ARTIFACT_ALIAS", "alias_regex": "("}, "RE2"),
        ({"event": "ADD_ARTIFACT_ALIAS", "alias_regex": "x" * 257}, "256"),
        ({"event": "ADD_ARTIFACT_TAG", "tag_regex": "(?=x)"}, "RE2"),
        ({"alias_regex": "x"}, "alias_regex goes with"),
        ({"run_user": "ada"}, "run_user goes with"),
        ({"event": "RUN_METRIC"}, "metric is required"),
        ({"event": "RUN_METRIC", "metric": METRIC | {"comparison": "=>"}}, "comparison"),
        ({"event": "RUN_METRIC", "metric": METRIC | {"threshold": None}}, "threshold"),
        ({"event": "RUN_METRIC", "metric": METRIC | {"aggregate": "sum"}}, "aggregate"),
        ({"event": "RUN_METRIC", "metric": METRIC | {"window": 0}}, "window"),
        ({"event": "RUN_METRIC", "metric": METRIC, "run_name_regex": "["}, "RE2"),
        ({"event": "RUN_METRIC", "metric": METRIC, "scope": REGISTRY}, "projects only"),
        ({"event": "RUN_STATE", "scope": REGISTRY}, "projects only"),
        ({"event": "RUN_STATE", "run_states": ["done"]}, "done"),
        ({"event": "webhook.disabled"}, "No automation can listen"),
        ({"event": "NOPE"}, "event"),
        ({"scope": {"type": "project", "entity": "acme"}}, "scope"),
        ({"scope": {"type": "project", "entity": "acme", "project": "wandb-registry-r"}}, "registry"),
        ({"scope": {"type": "galaxy"}}, "scope"),
        ({"action_type": "Carrier pigeon"}, "action_type"),
        ({"payload": '{"n": ${alias}}'}, "JSON"),
        ({"payload": '{"a": "${nope}"}'}, "${nope}"),
        ({"payload": '{"a": "${SIGNING}"}'}, "${SIGNING}"),
        ({"name": ""}, "name"),
        ({"colour": "red"}, "colour"),
        ({"team": None}, "team"),
    ],
)
def test_an_automation_that_cannot_be_is_422_and_says_why(
    office: Office, receiver: Receiver, api: TestClient, change: dict[str, Any], names: str
):
    answered = api.post("/v1/automations", json=automation(office.webhook(receiver.url()), **change))

    assert answered.status_code == 422, answered.text
    assert names in answered.json()["error"]["message"]


def test_a_payload_may_name_the_attached_secret_alone(office: Office, receiver: Receiver, api: TestClient):
    office.secret("SIGNING", "v")
    office.secret("TOKEN", "t")
    webhook = office.webhook(receiver.url(), secret="SIGNING", access_token="TOKEN")

    good = api.post(
        "/v1/automations", json=automation(webhook, payload='{"a": "${SIGNING} ${ACCESS_TOKEN}"}')
    )
    bad = api.post("/v1/automations", json=automation(webhook, payload='{"a": "${TOKEN}"}'))

    assert (good.status_code, bad.status_code) == (200, 422)


def test_automations_are_listed_changed_and_switched(office: Office, receiver: Receiver, api: TestClient):
    webhook = office.webhook(receiver.url())
    ids = []
    for number, scope in enumerate([PROJECT, REGISTRY, PROJECT]):
        office.turn(seconds=1)
        made = api.post(
            "/v1/automations", json=automation(webhook, scope=scope, name=f"a{number}", description=None)
        )
        ids.append(made.json()["id"])

    def listed(**query: Any) -> list[str]:
        return [row["id"] for row in api.get("/v1/automations", params=query).json()["data"]]

    assert listed() == ids and listed(order="desc") == ids[::-1]
    assert listed(project="p") == [ids[0], ids[2]] and listed(registry="r") == [ids[1]]
    assert listed(event="LINK_ARTIFACT", webhook_id=webhook) == ids
    assert listed(event="RUN_STATE") == listed(webhook_id="unknown") == []
    assert listed(limit=1, after=ids[0]) == [ids[1]]
    assert api.get("/v1/automations", params={"after": "nonsense"}).status_code == 422
    path = f"/v1/automations/{ids[0]}"
    changed = api.patch(path, json={"event": "ADD_ARTIFACT_ALIAS", "alias_regex": "^v"}).json()
    assert (changed["event"], changed["alias_regex"], changed["name"]) == ("ADD_ARTIFACT_ALIAS", "^v", "a0")
    assert api.patch(path, json={"alias_regex": None}).status_code == 422
    assert api.patch(path, json={"enabled": False}).json()["enabled"] is False
    assert listed(enabled=True) == ids[1:]
    office.alias(office.version(), "v-two")
    office.run()
    assert receiver.received == []
    api.patch(path, json={"enabled": True})
    office.alias(office.version(), "v-three")
    office.run()
    assert len(receiver.received) == 1


def test_an_alias_fires_what_its_pattern_finds(office: Office, receiver: Receiver):
    webhook = office.webhook(receiver.url())
    fires = office.automation(webhook, alias_regex="^prod", payload='{"a": "${alias}"}')
    office.automation(webhook, alias_regex="^staging$")

    office.alias(office.version(), 'prod","admin":true,"y":"')
    office.run()

    (got,) = receiver.received
    assert json.loads(got.body) == {"a": 'prod","admin":true,"y":"'}
    assert len(office.history(fires)) == 1


def test_a_tag_fires_what_its_pattern_finds(office: Office, receiver: Receiver, api: TestClient):
    for path, more in (("/all", {}), ("/gold", {"tag_regex": "^gold"}), ("/other", {"tag_regex": "^old"})):
        office.automation(office.webhook(receiver.url(path)), "ADD_ARTIFACT_TAG", **more)

    api.put(f"{office.version()}/tags/golden")
    office.run()

    assert sorted(got.path for got in receiver.received) == ["/all", "/gold"]


def test_a_tag_and_a_link_fire_in_their_project_and_registry(
    office: Office, receiver: Receiver, api: TestClient
):
    def listening(path: str, event: str, scope: dict[str, Any]) -> None:
        hook = office.webhook(receiver.url(path))
        api.post("/v1/automations", json=automation(hook, event=event, scope=scope)).raise_for_status()

    listening("/tag", "ADD_ARTIFACT_TAG", PROJECT)
    listening("/link-project", "LINK_ARTIFACT", PROJECT)
    listening("/link-registry", "LINK_ARTIFACT", REGISTRY)
    listening("/tag-registry", "ADD_ARTIFACT_TAG", REGISTRY)
    version = office.version(accuracy=0.9)

    api.put(f"{version}/tags/gold")
    api.post(f"{version}/links", json={"registry": "r", "collection": "best"})
    api.put("/v1/registries/r/collections/best/versions/0/tags/approved")
    office.run()

    assert sorted(got.path for got in receiver.received) == [
        "/link-project",
        "/link-registry",
        "/tag",
        "/tag-registry",
    ]
    data = {got.path: json.loads(got.body)["data"] for got in receiver.received}
    assert (data["/tag"]["tag"], data["/tag"]["artifact_collection_name"]) == ("gold", "data")
    assert data["/link-registry"]["artifact_collection_name"] == "best"
    assert data["/link-registry"]["artifact_version_string"] == "acme/wandb-registry-r/best:v0"
    assert data["/link-registry"]["artifact_metadata"] == {"accuracy": 0.9}


def test_a_metric_fires_once_a_day_for_each_run_when_its_window_is_past_the_threshold(
    office: Office, receiver: Receiver, api: TestClient, model: str
):
    webhook = office.webhook(receiver.url())
    payload = '{"m": "${metric_name}=${metric_value} (${metric_threshold}) of ${run_name}"}'
    office.automation(webhook, "RUN_METRIC", metric=METRIC, payload=payload)
    for value in (0.25, 0.75, 1):
        api.post(RUN, json={"metrics": {"val/reward": value, "other": 1}})
        office.run()
    assert receiver.received == []
    api.post(RUN, json={"metrics": {"other": 1}})
    api.post(RUN, json={"metrics": {"val/reward": 0.5}})
    office.run()

    (got,) = receiver.received
    assert json.loads(got.body)["m"] == "val/reward=0.75 (>= 0.75) of agent"
    api.post(RUN, json={"metrics": {"val/reward": 5}})
    office.run()
    office.turn(hours=23)
    api.post(RUN, json={"metrics": {"val/reward": 5}})
    office.run()
    assert len(receiver.received) == 1
    office.turn(hours=1, minutes=1)
    api.post(RUN, json={"metrics": {"val/reward": 5}})
    office.run(twice=True)
    assert len(receiver.received) == 2


def test_the_log_operation_fires_metrics_and_filters_choose_the_run(
    office: Office, receiver: Receiver, api: TestClient, model: str
):
    metric = {"name": "val/reward", "comparison": ">", "threshold": 0.5}
    for path, filters in (
        ("/all", {}),
        ("/ada", {"run_user": "ada"}),
        ("/eve", {"run_user": "eve"}),
        ("/name", {"run_name_regex": "^ag.*t$"}),
        ("/other", {"run_name_regex": "^other$"}),
    ):
        office.automation(office.webhook(receiver.url(path)), "RUN_METRIC", metric=metric, **filters)

    api.post(f"/v1/preview/models/{model}/log", json={"split": "val", "trajectory_groups": [GROUP]})
    office.run()

    assert sorted(got.path for got in receiver.received) == ["/ada", "/all", "/name"]


def test_the_largest_numbers_that_there_are_hold_up_nobody_else(
    office: Office, receiver: Receiver, api: TestClient, model: str
):
    metric = {"name": "val/reward", "aggregate": "avg", "comparison": ">", "threshold": 0}
    for path in ("/avg", "/too"):
        office.automation(office.webhook(receiver.url(path)), "RUN_METRIC", metric=metric)
    huge = [GROUP["trajectories"][0] | {"reward": 1.7e308}] * 3
    body = {"split": "val", "trajectory_groups": [{"trajectories": huge}]}

    for _ in range(3):
        assert api.post(f"/v1/preview/models/{model}/log", json=body).status_code == 200
        office.run()

    assert sorted(got.path for got in receiver.received) == ["/avg", "/too"]


def test_the_states_of_a_training_job_fire(office: Office, receiver: Receiver, api: TestClient, model: str):
    payload = '{"s": "${job_state} ${error_message}", "run": "${run_name} ${run_user} ${run_id}"}'
    office.automation(office.webhook(receiver.url("/any")), "RUN_STATE", payload=payload)
    for path, filters in (
        ("/owner", {"run_user": "ada", "run_name_regex": "^agent$"}),
        ("/submitter", {"run_user": "bob"}),
        ("/other", {"run_name_regex": "^other$"}),
    ):
        office.automation(office.webhook(receiver.url(path)), "RUN_STATE", **filters)
    office.automation(office.webhook(receiver.url("/failed")), "RUN_STATE", run_states=["failed"])
    bob = {"Authorization": f"Bearer {teams.create_key(team='acme', user='bob', role=Role.MEMBER)[1]}"}
    body = {"model_id": model, "trajectory_groups": [GROUP]}
    job = api.post("/v1/preview/training-jobs", json=body, headers=bob).json()
    from tuneyard import leases

    claimed = leases.claim(job["id"], worker="w")
    assert claimed is not None
    leases.fail(claimed, "The loss is not a number.")
    office.run()

    assert sorted(json.loads(got.body)["s"] for got in receiver.at("/any")) == [
        "failed The loss is not a number.",
        "running ",
    ]
    assert [json.loads(got.body)["data"]["job_state"] for got in receiver.at("/failed")] == ["failed"]
    run = api.get(f"/v1/preview/models/{model}").json()["run_id"]
    assert json.loads(receiver.at("/any")[0].body)["run"] == f"agent ada {run}"
    assert [len(receiver.at(path)) for path in ("/owner", "/submitter", "/other")] == [2, 0, 0]


def test_a_test_calls_for_real_with_the_credentials_and_stores_nothing(
    office: Office, receiver: Receiver, api: TestClient
):
    import time

    office.now = round(time.time() * 1000)
    office.secret("TOKEN", "abc")
    shown = office.secret("SIGN", "hush")
    webhook = office.webhook(receiver.url(), access_token="TOKEN", secret="SIGN")
    path = f"/v1/teams/acme/webhooks/{webhook}"

    plain = api.post(f"{path}/test").json()
    filled = api.post(f"{path}/test", json={"payload": '{"a": "${artifact_collection_name}"}'}).json()

    assert (
        plain["delivered"]
        and plain["status_code"] == 200
        and plain["body"] == "ok"
        and plain["error"] is None
    )
    assert filled["delivered"]
    first, second = receiver.received
    assert first.body == b"{}" and json.loads(second.body) == {"a": "my-model"}
    assert second.headers["authorization"] == "Bearer abc"
    Verifier(shown["standard_webhooks_secret"]).verify(second.body, second.headers)
    assert api.get(f"{path}/deliveries").json()["data"] == []
    assert api.post(f"{path}/test", json={"payload": "[]"}).status_code == 422
    new = {"url": receiver.url("/new"), "access_token": "TOKEN"}
    assert api.post("/v1/teams/acme/webhooks/test", json=new).json()["delivered"]
    assert receiver.at("/new")[0].headers["authorization"] == "Bearer abc"


def test_a_test_says_what_failed(
    office: Office,
    receiver: Receiver,
    api: TestClient,
    authority: tuple[Path, ssl.SSLContext],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(settings(), "webhook_seconds", 1.0)
    for kind, url in (
        ("http", receiver.on("/404", answer(404, b"no such hook"))),
        ("http", receiver.on("/reset", reset())),
        ("timeout", receiver.on("/slow", drip(b"", every=0.5))),
        ("connect", "http://127.0.0.1:1/"),
        ("blocked", "http://169.254.43518/latest"),  # what the resolver takes for 169.254.169.254
        ("dns", "http://no-such-host.invalid/"),
    ):
        shown = api.post("/v1/teams/acme/webhooks/test", json={"url": url}).json()
        assert (shown["delivered"], shown["error"]["kind"]) == (False, kind) and shown["error"]["message"]
    with receiving(authority[1]) as secure:
        url = secure.url().replace("http:", "https:")
        shown = api.post("/v1/teams/acme/webhooks/test", json={"url": url}).json()
    assert shown["error"]["kind"] == "tls" and "cannot be trusted" in shown["error"]["message"]
    shown = api.post(
        "/v1/teams/acme/webhooks/test", json={"url": receiver.on("/again", answer(404, b"no"))}
    ).json()
    assert (shown["status_code"], shown["body"]) == (404, "no")


def test_history_comes_in_pages_newest_first(office: Office, receiver: Receiver, api: TestClient):
    webhook = office.webhook(receiver.url())
    made = office.automation(webhook)
    version = office.version()
    for number in range(5):
        office.turn(seconds=1)
        office.alias(version, f"a{number}")
        office.run()

    for path in (f"/v1/teams/acme/webhooks/{webhook}/deliveries", f"/v1/automations/{made}/executions"):
        whole = api.get(path).json()["data"]
        assert [row["created_at"] for row in whole] == sorted(
            (row["created_at"] for row in whole), reverse=True
        )
        first = api.get(path, params={"limit": 2}).json()
        rest = api.get(path, params={"limit": 3, "after": first["last_id"]}).json()
        assert first["has_more"] and not rest["has_more"]
        assert [row["id"] for row in first["data"] + rest["data"]] == [row["id"] for row in whole]
        assert api.get(path, params={"after": "msg_nonsense"}).status_code == 422


def test_every_event_that_automations_know_is_routed_to_the_match_queue(template: dict[str, Any]):
    from tuneyard import automations

    pattern = template["Resources"]["ArtifactEvents"]["Properties"]["EventPattern"]

    assert set(pattern["detail-type"]) == {event.value for event in automations.EVENTS}
    assert set(automations.EVENTS) == set(EventType) - {EventType.WEBHOOK_DISABLED, EventType.WEBHOOK_TEST}


def test_the_event_catalogue_of_the_guide_is_that_of_the_code():
    assert catalogue.markdown() in (ROOT / "docs" / "webhooks.md").read_text()
