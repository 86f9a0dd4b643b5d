"""Teams: who may do what, keys that are shown once, and secrets that are never shown."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tuneyard import auth, table, teams
from tuneyard.records import Role
from tuneyard.webhook_records import Secret
from webhook_fixtures import Office, Receiver, configured, office, receiver  # noqa: F401

PROJECT = {"type": "project", "entity": "acme", "project": "p"}
REGISTRY = {"type": "registry", "registry": "r"}


@pytest.fixture
def member(key: str) -> dict[str, str]:
    """The headers of a plain member's key."""
    return {"Authorization": f"Bearer {teams.create_key(team='acme', user='bob', role=Role.MEMBER)[1]}"}


def refused(answer: Any) -> str:
    """The sentence of a 403."""
    assert answer.status_code == 403, answer.text
    return str(answer.json()["error"]["message"])


def test_a_key_is_shown_once_and_works_until_it_is_revoked(api: TestClient):
    made = api.post("/v1/teams/acme/api-keys", json={"name": "ci"}).json()
    headers = {"Authorization": f"Bearer {made['key']}"}
    assert api.get("/v1/preview/models", headers=headers).status_code == 200

    listed = api.get("/v1/teams/acme/api-keys").json()
    assert made["key"] not in json.dumps(listed) and [row["name"] for row in listed["data"]] == ["", "ci"]
    assert api.delete(f"/v1/teams/acme/api-keys/{made['id']}").json()["revoked"]
    auth.forget()
    assert api.get("/v1/preview/models", headers=headers).status_code == 401
    assert api.delete("/v1/teams/acme/api-keys/unknown").status_code == 404


def test_members_are_added_changed_and_removed_with_their_keys(api: TestClient):
    assert api.post("/v1/teams/acme/api-keys", json={"user": "cid"}).status_code == 404
    assert api.put("/v1/teams/acme/members/cid", json={"role": "admin"}).json()["role"] == "admin"
    key = api.post("/v1/teams/acme/api-keys", json={"user": "cid"}).json()
    headers = {"Authorization": f"Bearer {key['key']}"}
    assert key["role"] == "admin"
    assert [row["user"] for row in api.get("/v1/teams/acme/members").json()["data"]] == ["ada", "cid"]

    api.put("/v1/teams/acme/members/cid", json={"role": "member"})
    auth.forget()
    assert "administrator" in refused(api.put("/v1/teams/acme/members/eva", json={}, headers=headers))
    assert api.post("/v1/teams/acme/api-keys", json={"user": "cid", "role": "admin"}).status_code == 422
    assert api.delete("/v1/teams/acme/members/cid").json()["deleted"]
    auth.forget()
    assert api.get("/v1/preview/models", headers=headers).status_code == 401
    assert api.delete("/v1/teams/acme/members/cid").status_code == 404


def test_a_team_is_never_left_without_an_administrator(api: TestClient):
    assert api.put("/v1/teams/acme/members/ada", json={"role": "member"}).status_code == 409
    assert api.delete("/v1/teams/acme/members/ada").status_code == 409


def test_members_read_and_change_nothing(
    office: Office, receiver: Receiver, api: TestClient, member: dict[str, str]
):
    office.secret("S", "v")
    webhook = office.webhook(receiver.url())
    automation = office.automation(webhook)
    hook = f"/v1/teams/acme/webhooks/{webhook}"

    for path in (
        "/v1/teams/acme/members", "/v1/teams/acme/api-keys", "/v1/teams/acme/secrets", "/v1/teams/acme/webhooks", hook,
        f"{hook}/deliveries", "/v1/automations", f"/v1/automations/{automation}",
        f"/v1/automations/{automation}/executions",
    ):  # fmt: skip
        assert (api.get(path, headers=member).status_code, path) == (200, path)
    new = {"name": "n", "url": receiver.url()}
    for method, path, body in (
        ("PUT", "/v1/teams/acme/members/eva", {}),
        ("DELETE", "/v1/teams/acme/members/ada", None),
        ("POST", "/v1/teams/acme/api-keys", {}),
        ("DELETE", "/v1/teams/acme/api-keys/x", None),
        ("PUT", "/v1/teams/acme/secrets/T", {"value": "v"}),
        ("DELETE", "/v1/teams/acme/secrets/S", None),
        ("POST", "/v1/teams/acme/webhooks", new),
        ("POST", "/v1/teams/acme/webhooks/test", new),
        ("PATCH", hook, {"name": "x"}),
        ("DELETE", hook, None),
        ("POST", f"{hook}/test", {}),
        ("POST", f"{hook}/recover", {"since": "2027-01-01T00:00:00Z"}),
        ("PATCH", f"/v1/automations/{automation}", {"name": "x"}),
        ("DELETE", f"/v1/automations/{automation}", None),
        (
            "POST",
            "/v1/automations",
            {"name": "a", "team": "acme", "scope": PROJECT, "event": "LINK_ARTIFACT", "webhook_id": webhook},
        ),
    ):
        sentence = refused(api.request(method, path, json=body, headers=member))
        assert "administrator" in sentence


def test_a_member_may_be_granted_a_project_or_a_registry(
    office: Office, receiver: Receiver, api: TestClient, member: dict[str, str]
):
    webhook = office.webhook(receiver.url())
    body = {"name": "a", "team": "acme", "event": "LINK_ARTIFACT", "webhook_id": webhook}
    grants = [{"type": "project", "project": "p"}, {"type": "registry", "registry": "r"}]
    shown = api.put("/v1/teams/acme/members/bob", json={"admin_of": grants}).json()
    assert shown["admin_of"] == grants

    for scope in (PROJECT, REGISTRY):
        made = api.post("/v1/automations", json=body | {"scope": scope}, headers=member)
        assert made.status_code == 200 and made.json()["scope"] == scope
    other = {"type": "project", "entity": "acme", "project": "q"}
    assert "project 'q'" in refused(api.post("/v1/automations", json=body | {"scope": other}, headers=member))
    path = f"/v1/automations/{made.json()['id']}"
    assert "project 'q'" in refused(api.patch(path, json={"scope": other}, headers=member))
    assert api.delete(path, headers=member).status_code == 200
    for bad in ([{"type": "project", "registry": "r"}], [{"type": "registry"}], [{"type": "team"}]):
        assert api.put("/v1/teams/acme/members/bob", json={"admin_of": bad}).status_code == 422


def test_another_teams_things_are_404_and_cannot_be_used(
    office: Office, receiver: Receiver, api: TestClient, stranger: dict[str, str]
):
    office.secret("S", "v")
    delivery = office.fire(receiver.url(), secret="S")
    webhook, automation = office.row(delivery).webhook_id, office.row(delivery).automation_id
    hook = f"/v1/teams/acme/webhooks/{webhook}"

    for method, path, body in (
        ("GET", "/v1/teams/acme/members", None),
        ("GET", "/v1/teams/acme/secrets", None),
        ("PUT", "/v1/teams/acme/secrets/S", {"value": "x"}),
        ("GET", "/v1/teams/acme/webhooks", None),
        ("GET", hook, None),
        ("PATCH", hook, {"name": "x"}),
        ("POST", f"{hook}/test", {}),
        ("GET", f"/v1/teams/rivals/webhooks/{webhook}", None),
        ("GET", f"/v1/automations/{automation}", None),
        ("DELETE", f"/v1/automations/{automation}", None),
        ("GET", f"/v1/automations/{automation}/executions", None),
        ("GET", f"/v1/deliveries/{delivery}", None),
        ("POST", f"/v1/deliveries/{delivery}/redeliver", None),
    ):
        answer = api.request(method, path, json=body, headers=stranger)
        assert (answer.status_code, method, path) == (404, method, path)
    assert api.get("/v1/automations", headers=stranger).json()["data"] == []
    body = {"name": "a", "team": "rivals", "event": "LINK_ARTIFACT", "webhook_id": webhook, "scope": REGISTRY}
    assert api.post("/v1/automations", json=body, headers=stranger).status_code == 404
    theirs = {"type": "project", "entity": "acme", "project": "p"}
    assert api.post("/v1/automations", json=body | {"scope": theirs}, headers=stranger).status_code == 404
    named = {"name": "n", "url": receiver.url(), "secret": "S"}
    assert api.post("/v1/teams/rivals/webhooks", json=named, headers=stranger).status_code == 422


def test_an_event_of_one_team_fires_nothing_of_another(
    office: Office, receiver: Receiver, api: TestClient, stranger: dict[str, str]
):
    hook = api.post(
        "/v1/teams/rivals/webhooks", json={"name": "n", "url": receiver.url()}, headers=stranger
    ).json()
    scope = {"type": "project", "entity": "rivals", "project": "p"}
    body = {"name": "a", "team": "rivals", "scope": scope, "event": "ADD_ARTIFACT_ALIAS", "alias_regex": ".*"}
    made = api.post("/v1/automations", json=body | {"webhook_id": hook["id"]}, headers=stranger)
    assert made.status_code == 200

    office.alias(office.version(), "x")
    office.run()

    assert receiver.received == []


def test_a_secret_is_never_readable_again(office: Office, api: TestClient):
    stored = api.put("/v1/teams/acme/secrets/KEY", json={"value": "plain text"}).json()
    assert stored["standard_webhooks_secret"] == "whsec_cGxhaW4gdGV4dA=="

    shown = api.get("/v1/teams/acme/secrets").text
    assert "KEY" in shown and "plain text" not in shown and "cGxhaW4" not in shown
    row = table.get(Secret, "acme", "KEY")
    assert row is not None and "plain text" not in row.model_dump_json()
    assert api.delete("/v1/teams/acme/secrets/KEY").json()["deleted"]
    assert api.delete("/v1/teams/acme/secrets/KEY").status_code == 404


@pytest.mark.parametrize(
    "name", ["1A", "a-b", "a b", "alias", "ACCESS_TOKEN", "project_name", "x" * 65, "artifact_metadata"]
)
def test_a_name_that_cannot_be_a_variable_of_its_own_is_422(api: TestClient, name: str):
    assert api.put(f"/v1/teams/acme/secrets/{name}", json={"value": "v"}).status_code == 422


@pytest.mark.parametrize(
    "value", ["", "a\r\nX-Evil: 1", "a\n", " a", "a\x00", "x" * 4097, "whsec_!!!", "whsec_", "\ud800"]
)
def test_a_value_that_a_header_cannot_carry_is_422(api: TestClient, value: str):
    answer = api.put(
        "/v1/teams/acme/secrets/S",
        content=json.dumps({"value": value}),
        headers={"Content-Type": "application/json"},
    )

    assert answer.status_code == 422


def test_a_secret_that_is_used_cannot_be_deleted_nor_made_unfit(
    office: Office, receiver: Receiver, api: TestClient
):
    office.secret("TOKEN", "abc")
    office.secret("EMOJI", "🔑")
    assert (
        api.post(
            "/v1/teams/acme/webhooks", json={"name": "n", "url": receiver.url(), "access_token": "EMOJI"}
        ).status_code
        == 422
    )
    webhook = office.webhook(receiver.url(), access_token="TOKEN", secret="EMOJI")

    assert api.delete("/v1/teams/acme/secrets/TOKEN").status_code == 409
    assert api.put("/v1/teams/acme/secrets/TOKEN", json={"value": "🔑"}).status_code == 422
    hook = f"/v1/teams/acme/webhooks/{webhook}"
    assert api.patch(hook, json={"access_token": None, "secret": "TOKEN"}).status_code == 200
    assert api.delete("/v1/teams/acme/secrets/EMOJI").status_code == 200
    assert api.delete("/v1/teams/acme/secrets/TOKEN").status_code == 409
    assert api.delete(hook).status_code == 200
    assert api.delete("/v1/teams/acme/secrets/TOKEN").status_code == 200


def test_members_keys_and_secrets_come_in_pages(api: TestClient):
    for number in range(3):
        api.put(f"/v1/teams/acme/members/m{number}", json={})
        api.put(f"/v1/teams/acme/secrets/S{number}", json={"value": "v"})
        api.post("/v1/teams/acme/api-keys", json={})

    for path in ("/v1/teams/acme/members", "/v1/teams/acme/secrets", "/v1/teams/acme/api-keys"):
        first = api.get(path, params={"limit": 2}).json()
        rest = api.get(path, params={"limit": 100, "after": first["last_id"]}).json()
        whole = [row["id"] for row in api.get(path).json()["data"]]
        assert first["has_more"] and [row["id"] for row in first["data"] + rest["data"]] == whole
        assert api.get(path, params={"after": "nonsense"}).status_code == 422
