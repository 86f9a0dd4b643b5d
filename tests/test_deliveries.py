"""What a delivery carries, how it is signed, and what of it is shown afterwards, on a receiver that misbehaves on order."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time

import pytest
from fastapi.testclient import TestClient
from standardwebhooks import Webhook as Verifier

from tuneyard.settings import settings
from webhook_fixtures import Office, Receiver, answer, configured, office, raw, receiver  # noqa: F401


def test_a_delivery_is_signed_both_ways_and_carries_its_token(office: Office, receiver: Receiver):
    office.now = round(time.time() * 1000)
    office.secret("TOKEN", "ghp_secret")
    shown = office.secret("SIGNING", "hush hush, it is ours")

    office.fire(receiver.url(), payload='{"text": "${alias}"}', access_token="TOKEN", secret="SIGNING")

    (got,) = receiver.received
    assert got.body == b'{"text":"production"}'
    assert got.headers["content-type"] == "application/json"
    assert got.headers["authorization"] == "Bearer ghp_secret"
    expected = hmac.new(b"hush hush, it is ours", got.body, hashlib.sha256).hexdigest()
    assert got.headers["x-service-signature"] == expected
    assert Verifier(shown["standard_webhooks_secret"]).verify(got.body, got.headers) == {"text": "production"}
    assert got.headers["x-service-event"] == "ADD_ARTIFACT_ALIAS"
    assert got.headers["x-service-attempt"] == "1"
    assert got.headers["accept-encoding"] == "identity"


def test_without_a_secret_nothing_is_signed_and_without_a_payload_everything_is_told(
    office: Office, receiver: Receiver
):
    office.fire(receiver.url())

    (got,) = receiver.received
    assert not {"authorization", "x-service-signature", "webhook-signature"} & set(got.headers)
    body = json.loads(got.body)
    assert body["type"] == "ADD_ARTIFACT_ALIAS"
    assert body["data"]["artifact_version_string"] == "acme/p/data:production"
    assert body["data"]["artifact_version"] == "wandb-artifact:///acme/p/data:v0"


def test_a_rotated_secret_signs_with_both_keys_for_a_day(office: Office, receiver: Receiver):
    office.secret("S", "first")
    automation = office.automation(office.webhook(receiver.url(), secret="S"))
    version = office.version()
    office.secret("S", "second")
    office.secret("S", "second")

    office.alias(version, "one")
    office.run()
    office.turn(hours=25)
    office.alias(version, "two")
    office.run()

    during, after = receiver.received
    for got, keys in ((during, [b"second", b"first"]), (after, [b"second"])):
        content = f"{got.headers['webhook-id']}.{got.headers['webhook-timestamp']}.".encode() + got.body
        found = [f"v1,{_b64(hmac.digest(key, content, 'sha256'))}" for key in keys]
        assert got.headers["webhook-signature"].split(" ") == found
        assert got.headers["x-service-signature"] == hmac.new(b"second", got.body, "sha256").hexdigest()
    assert (
        during.headers["x-service-signature-previous"]
        == hmac.new(b"first", during.body, "sha256").hexdigest()
    )
    assert "x-service-signature-previous" not in after.headers
    assert len(office.history(automation)) == 2


@pytest.mark.parametrize(("hours", "signs"), [(0, False), (168, True)])
def test_how_long_the_secret_before_signs_is_up_to_its_owner(
    office: Office, receiver: Receiver, api: TestClient, hours: float, signs: bool
):
    office.secret("S", "first")
    office.automation(office.webhook(receiver.url(), secret="S"))
    office.secret("S", "second", overlap_hours=hours)

    office.turn(days=6.9)
    office.alias(office.version(), "x")
    office.run()

    (got,) = receiver.received
    assert ("x-service-signature-previous" in got.headers) is signs
    for wrong in (-1, 169):
        body = {"value": "third", "overlap_hours": wrong}
        assert api.put("/v1/teams/acme/secrets/S", json=body).status_code == 422


def test_another_secret_on_the_webhook_overlaps_with_the_one_before_it(
    office: Office, receiver: Receiver, api: TestClient
):
    office.secret("OLD", "first")
    office.secret("NEW", "second")
    webhook = office.webhook(receiver.url(), secret="OLD")
    office.automation(webhook)
    assert api.patch(f"/v1/teams/acme/webhooks/{webhook}", json={"secret": "NEW"}).status_code == 200

    office.alias(office.version(), "x")
    office.run()

    (got,) = receiver.received
    assert got.headers["x-service-signature-previous"] == hmac.new(b"first", got.body, "sha256").hexdigest()


def test_a_secret_that_cannot_be_read_sends_nothing_and_is_tried_again(
    office: Office, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    from tuneyard import vault

    office.secret("S", "value")
    automation = office.automation(office.webhook(receiver.url(), secret="S"))
    office.alias(office.version(), "x")
    vault.forget()
    with monkeypatch.context() as patched:
        patched.setattr(settings(), "secret_prefix", "elsewhere")
        office.run()

    (row,) = office.history(automation)
    assert receiver.received == [] and row["status"] == "pending"
    assert office.delivery(row["id"])["attempts"][0]["outcome"] == "credentials_error"
    office.due(row["id"])
    assert len(receiver.received) == 1 and "x-service-signature" in receiver.received[0].headers


def test_a_secret_that_is_echoed_without_its_prefix_is_masked_too(office: Office, receiver: Receiver):
    office.secret("SIGN", "whsec_c2VjcmV0IHNlY3JldA==")
    url = receiver.on("/hook", answer(500, b"your key is c2VjcmV0IHNlY3JldA==, or so"))

    shown = office.delivery(office.fire(url, secret="SIGN"))

    assert shown["attempts"][0]["body"] == "your key is ***, or so"


def test_an_endpoint_that_echoes_secrets_finds_them_masked_everywhere(
    office: Office, receiver: Receiver, api: TestClient
):
    office.secret("TOKEN", 'to"ken/value')
    office.secret("SIGN", "s3cret")
    told = b'{"you sent": "Bearer to\\"ken/value", "s3cret": "to%22ken/value to%22ken%2Fvalue"}'
    url = receiver.always("/hook", answer(500, told, X_Echo='to"ken/value s3cret'))
    payload = '{"a": "${ACCESS_TOKEN}", "b": "${SIGN}"}'
    delivery = office.fire(url, payload=payload, access_token="TOKEN", secret="SIGN")
    webhook = office.row(delivery).webhook_id

    assert json.loads(receiver.received[0].body) == {"a": 'to"ken/value', "b": "s3cret"}
    shown = office.delivery(delivery)
    tested = api.post(f"/v1/teams/acme/webhooks/{webhook}/test", json={"payload": payload}).json()
    for text in (json.dumps(shown), json.dumps(tested)):
        for secret in ("ken/value", "s3cret", "ken%2Fvalue"):
            assert secret not in text
    assert json.loads(shown["payload"]) == {"a": "***", "b": "***"}
    assert "***" in shown["attempts"][0]["body"] and "***" in shown["attempts"][0]["headers"]["x-echo"]
    assert "***" in tested["body"]


def test_what_was_sent_is_shown_when_its_secret_its_webhook_and_its_automation_are_gone(
    office: Office, receiver: Receiver, api: TestClient, stranger: dict[str, str]
):
    office.secret("SIGN", "s3cret")
    payload = '{"a": "${alias} ${artifact_metadata.none}", "b": "${SIGN}"}'
    delivery = office.fire(receiver.url(), payload=payload, secret="SIGN")
    row = office.row(delivery)

    for request in (
        ("PATCH", f"/v1/teams/acme/webhooks/{row.webhook_id}", {"secret": None}),
        ("DELETE", f"/v1/automations/{row.automation_id}", None),
        ("DELETE", f"/v1/teams/acme/webhooks/{row.webhook_id}", None),
    ):
        method, path, body = request
        assert api.request(method, path, json=body).status_code == 200
        assert [one["id"] for one in office.history(row.automation_id)] == [delivery]
        assert json.loads(office.delivery(delivery)["payload"]) == {"a": "production ", "b": "***"}
    path = f"/v1/automations/{row.automation_id}/executions"
    assert api.get(path, headers=stranger).status_code == 404


def test_an_answer_that_cannot_be_read_is_quoted_without_the_secrets(office: Office, receiver: Receiver):
    office.secret("TOKEN", "ghp_secret")
    told = raw(b"HTTP/1.1 200 OK\r\nBearer ghp_secret\r\n\r\n")

    shown = office.delivery(office.fire(receiver.on("/hook", told), access_token="TOKEN"))

    assert shown["status"] == "pending" and "***" in shown["attempts"][0]["error"]
    assert "ghp_secret" not in json.dumps(shown)


def test_a_body_that_becomes_too_large_is_rejected_without_a_post(office: Office, receiver: Receiver):
    automation = office.automation(
        office.webhook(receiver.url()), payload=json.dumps({"t": "${artifact_metadata.big}" * 10})
    )
    office.alias(office.version(big="x" * 60_000), "x")
    office.run()

    (row,) = office.history(automation)
    assert row["status"] == "rejected" and "256 KB" in row["reason"]
    assert receiver.received == []


def test_a_blocked_target_is_rejected_at_once(office: Office, receiver: Receiver):
    delivery = office.fire("http://169.254.43518/latest")

    shown = office.delivery(delivery)
    assert shown["status"] == "rejected" and "169.254.169.254" in shown["reason"]
    assert shown["attempts"][0]["outcome"] == "blocked"


def _b64(raw_bytes: bytes) -> str:
    return base64.b64encode(raw_bytes).decode()
