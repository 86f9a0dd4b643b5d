"""Teams: who may do what, keys that are shown once, and secrets that are never shown."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from tuneyard import auth, table, teams
from tuneyard.records import Role
from tuneyard.webhook_records import Secret
from tuneyard_host.local import doors
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


def requests_of(*functions: str, **values: str) -> list[tuple[str, str]]:
    """Method and path of every route of these functions that names something, with the values in its place."""
    routes = [route for name in functions for route in doors.modules()[name].router.routes]
    return [
        (method, route.path.format_map(values))
        for route in routes
        if isinstance(route, APIRoute) and "{" in route.path
        for method in route.methods
    ]


def test_members_read_and_change_nothing(
    office: Office, receiver: Receiver, api: TestClient, member: dict[str, str]
):
    office.secret("S", "v")
    delivery = office.fire(receiver.url())
    webhook, automation = office.row(delivery).webhook_id, office.row(delivery).automation_id
    known = {"webhook_id": webhook, "automation_id": automation, "delivery_id": delivery, "team": "acme"}
    new = {"name": "a", "team": "acme", "scope": PROJECT, "event": "LINK_ARTIFACT", "webhook_id": webhook}

    answers = {
        (method, path): api.request(method, path, json=None if method == "GET" else {}, headers=member)
        for method, path in requests_of("teams", "automations", **known, user="ada", key_id="k", name="S")
    }
    answers["POST", "/v1/automations"] = api.post("/v1/automations", json=new, headers=member)

    assert len(answers) > 20
    for (method, path), answered in answers.items():
        if method == "GET":
            assert (answered.status_code, path) == (200, path)
        else:
            assert "administrator" in refused(answered), (method, path)
    assert len(receiver.received) == 1 and office.history(automation)[0]["attempt_count"] == 1


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
    key_id = api.get("/v1/teams/acme/api-keys").json()["data"][0]["id"]
    things = {"webhook_id": webhook, "automation_id": automation, "delivery_id": delivery}
    names = {"user": "ada", "key_id": key_id, "name": "S"}

    theirs = requests_of("teams", "automations", **things, **names, team="acme")
    as_mine = requests_of("automations", **things, team="rivals")
    as_mine += [
        ("DELETE", f"/v1/teams/rivals/{one}") for one in ("members/ada", f"api-keys/{key_id}", "secrets/S")
    ]
    for method, path in [*theirs, *(one for one in as_mine if webhook in one[1] or one[0] == "DELETE")]:
        answer = api.request(method, path, json=None if method == "GET" else {}, headers=stranger)
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
