"""Deliveries, end to end: an event, the queues, and a receiver that misbehaves on order."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import itertools
import json
import threading
import time
from typing import Any

import botocore.client
import pytest
from fastapi.testclient import TestClient
from standardwebhooks import Webhook as Verifier

from tuneyard import clock, deliveries, ids, matcher, retries, sender, table
from tuneyard.queues import Ring
from tuneyard.settings import settings
from tuneyard.webhook_records import (
    Answer,
    Automation,
    DeliveryStatus,
    Outcome,
    Slot,
    Waiting,
    Webhook,
)
from tuneyard_host.local import doors
from webhook_fixtures import Office, Receiver, answer, configured, drip, office, raw, receiver, reset  # noqa: F401


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


def test_the_schedule_is_eight_attempts_in_27_hours_under_one_id(office: Office, receiver: Receiver):
    url = receiver.always("/hook", answer(500))
    began = office.now
    delivery = office.fire(url)
    times = [office.now - began]
    while office.row(delivery).status is DeliveryStatus.PENDING:
        office.due(delivery)
        times.append(office.now - began)

    waits = [(b - a) / 1000 for a, b in itertools.pairwise(times)]
    assert len(receiver.received) == 8
    for wait, planned in zip(waits, settings().webhook_schedule[1:], strict=True):
        assert planned <= wait <= planned * 1.2 + 1
    assert 27.5 * 3600 < times[-1] / 1000 < 34 * 3600
    assert len({got.headers["webhook-id"] for got in receiver.received}) == 1
    assert [got.headers["x-service-attempt"] for got in receiver.received] == list("12345678")
    assert len({got.body for got in receiver.received}) == 1
    shown = office.delivery(delivery)
    assert shown["status"] == "exhausted" and shown["status_code"] == 500
    assert [one["number"] for one in shown["attempts"]] == list(range(1, 9))
    assert office.row(delivery).expires == began // 1000 + 30 * 86_400

    receiver.scripts.clear()
    assert office.api.post(f"/v1/deliveries/{delivery}/redeliver").json()["status"] == "pending"
    office.run()

    assert office.delivery(delivery)["status"] == "succeeded"
    assert {got.headers["webhook-id"] for got in receiver.received} == {delivery}


def test_what_is_due_later_than_a_message_can_wait_is_rung_for_by_the_sweep(
    office: Office, receiver: Receiver
):
    delivery = office.fire(receiver.on("/hook", *[answer(500)] * 3))
    office.due(delivery)
    office.due(delivery)
    row = office.row(delivery)
    assert not row.rung and 1800 <= (row.due_at - office.now) / 1000 <= 2161

    deliveries.sweep(office.now + 60_000)
    office.run()
    assert len(receiver.received) == 3
    office.now = row.due_at
    deliveries.sweep(office.now)
    office.run()

    assert office.delivery(delivery)["status"] == "succeeded"


@pytest.mark.parametrize(
    ("script", "waits"),
    [
        (answer(429, Retry_After="120"), (120, 121)),
        (answer(503, Retry_After="3"), (5, 7)),
        (answer(503, Retry_After="99999999"), (6 * 3600, 6 * 3600 + 1)),
        (answer(429), (60, 61)),
        (answer(429, Retry_After="soon"), (60, 61)),
        (answer(500, Retry_After="999"), (5, 7)),
        (answer(302, Location="http://169.254.169.254/"), (5, 7)),
        (answer(404), (5, 7)),
        (reset(), (5, 7)),
        (raw(b"nonsense\r\n\r\n"), (5, 7)),
        (raw(b""), (5, 7)),
    ],
)
def test_what_is_no_success_is_tried_again_when_the_endpoint_asks_and_never_sooner(
    office: Office, receiver: Receiver, script: Any, waits: tuple[int, int]
):
    delivery = office.fire(receiver.on("/hook", script))

    row = office.row(delivery)
    assert row.status is DeliveryStatus.PENDING
    assert waits[0] <= (row.due_at - office.now) / 1000 <= waits[1] + 1
    office.due(delivery)
    assert office.delivery(delivery)["status"] == "succeeded"
    assert len(receiver.received) == 2


def test_a_retry_after_date_is_understood(office: Office, receiver: Receiver):
    from email.utils import formatdate

    delivery = office.fire(receiver.on("/hook", answer(503, Retry_After=formatdate(office.now / 1000 + 300))))

    assert 298 <= (office.row(delivery).due_at - office.now) / 1000 <= 302


@pytest.mark.parametrize(
    "script",
    [
        answer(204),
        answer(299, b"x" * 100_000),
        reset(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"),
        raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnonsense"),
    ],
)
def test_two_hundred_with_complete_headers_is_a_success_whatever_comes_after(
    office: Office, receiver: Receiver, script: Any
):
    assert office.delivery(office.fire(receiver.on("/hook", script)))["status"] == "succeeded"


def test_a_drip_ends_at_the_deadline_and_holds_nobody(
    office: Office, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(settings(), "webhook_seconds", 2.0)
    url = receiver.on("/hook", drip(b"HTTP/1.1 200 OK\r\nX-Slow: ", every=0.3))
    began = time.monotonic()

    delivery = office.fire(url)

    (attempt,) = office.delivery(delivery)["attempts"]
    assert attempt["outcome"] == "timeout"
    assert 1.9 <= attempt["duration_ms"] / 1000 <= 2.3
    assert time.monotonic() - began < 10
    assert (office.row(delivery).due_at - office.now) / 1000 >= 60


def test_410_disables_the_webhook_and_holds_the_rest_until_it_is_enabled(
    office: Office, receiver: Receiver, api: TestClient
):
    url = receiver.on("/hook", answer(500), answer(410))
    webhook = office.webhook(url)
    automation = office.automation(webhook)
    version = office.version()
    office.alias(version, "one")
    office.run()
    office.turn(seconds=1)
    office.alias(version, "two")
    office.run()

    gone, waiting = office.history(automation)
    assert (gone["status"], waiting["status"]) == ("rejected", "held")
    shown = api.get(f"/v1/teams/acme/webhooks/{webhook}").json()
    assert not shown["enabled"] and "410" in shown["disabled_reason"]
    office.due(waiting["id"])
    assert office.row(waiting["id"]).status is DeliveryStatus.HELD
    assert len(receiver.received) == 2

    assert api.patch(f"/v1/teams/acme/webhooks/{webhook}", json={"enabled": True}).json()["enabled"]
    office.run()
    assert office.delivery(waiting["id"])["status"] == "succeeded"


def test_a_webhook_disabled_by_hand_holds_what_is_due_and_sends_it_when_it_is_enabled(
    office: Office, receiver: Receiver, api: TestClient
):
    webhook = office.webhook(receiver.url())
    automation = office.automation(webhook)
    path = f"/v1/teams/acme/webhooks/{webhook}"
    assert api.patch(path, json={"enabled": False}).json()["disabled_reason"] == "It was disabled by hand."
    office.alias(office.version(), "x")
    office.run()
    (held,) = office.history(automation)
    assert held["status"] == "held" and receiver.received == []
    assert api.post(f"/v1/deliveries/{held['id']}/redeliver").status_code == 409

    api.patch(path, json={"enabled": True})
    office.run()

    assert office.delivery(held["id"])["status"] == "succeeded" and len(receiver.received) == 1


def test_what_was_just_to_be_held_when_its_webhook_was_enabled_is_sent(
    office: Office, receiver: Receiver, api: TestClient, monkeypatch: pytest.MonkeyPatch
):
    webhook = office.webhook(receiver.url())
    automation = office.automation(webhook)
    path = f"/v1/teams/acme/webhooks/{webhook}"
    api.patch(path, json={"enabled": False})
    office.alias(office.version(), "x")
    move = deliveries.move

    def too_late(*given: Any, **changes: Any) -> Any:
        if changes.get("status") is DeliveryStatus.HELD:
            api.patch(path, json={"enabled": True})
        return move(*given, **changes)

    monkeypatch.setattr(deliveries, "move", too_late)
    office.run()
    office.turn(minutes=2)
    deliveries.sweep(office.now)
    office.run()

    assert [row["status"] for row in office.history(automation)] == ["succeeded"]


def test_many_held_deliveries_are_sent_piece_by_piece_the_oldest_first(
    office: Office, receiver: Receiver, api: TestClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(deliveries, "PIECE", 3)
    monkeypatch.setattr(settings(), "webhook_in_flight", 1)
    webhook = office.webhook(receiver.url())
    automation = office.automation(webhook, payload='{"alias": "${alias}"}')
    path = f"/v1/teams/acme/webhooks/{webhook}"
    api.patch(path, json={"enabled": False})
    version = office.version()
    for number in range(8):
        office.alias(version, f"a{number}")
        office.run()
        office.turn(seconds=1)
    assert {row["status"] for row in office.history(automation)} == {"held"}

    api.patch(path, json={"enabled": True})
    assert [row["status"] for row in office.history(automation)][::-1] == ["pending"] * 3 + ["held"] * 5
    office.run(twice=True)

    sent = [json.loads(got.body)["alias"] for got in receiver.received]
    pieces = [sorted(sent[start : start + 3]) for start in (0, 3, 6)]
    assert pieces == [["a0", "a1", "a2"], ["a3", "a4", "a5"], ["a6", "a7"]]


def test_many_failed_deliveries_are_recovered_piece_by_piece(
    office: Office, receiver: Receiver, api: TestClient, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(deliveries, "PIECE", 3)
    monkeypatch.setattr(settings(), "webhook_schedule", [0])
    receiver.scripts["/hook"] = [answer(500)] * 8
    webhook = office.webhook(receiver.url())
    automation = office.automation(webhook)
    version, since = office.version(), clock.iso(office.now)
    for number in range(8):
        office.alias(version, f"a{number}")
        office.run()
        office.turn(seconds=1)
    assert {row["status"] for row in office.history(automation)} == {"exhausted"}

    answered = api.post(f"/v1/teams/acme/webhooks/{webhook}/recover", json={"since": since}).json()
    office.run()

    assert answered == {"recovered": 3, "more": True}
    assert {row["status"] for row in office.history(automation)} == {"succeeded"}


def test_a_hopeless_webhook_is_disabled_by_one_event_and_can_be_recovered(
    office: Office, receiver: Receiver, api: TestClient
):
    url = receiver.always("/hook", answer(500))
    told_of = office.rule("webhook.disabled")
    webhook = office.webhook(url)
    automation = office.automation(webhook)
    version = office.version()
    office.turn(days=5)
    for name in ("one", "two"):
        office.alias(version, name)
        office.run()
    for _ in range(20):
        for row in office.history(automation):
            if row["status"] == "pending":
                office.due(row["id"])

    shown = api.get(f"/v1/teams/acme/webhooks/{webhook}").json()
    assert not shown["enabled"] and "5 days" in shown["disabled_reason"]
    (told,) = [json.loads(message["Body"])["detail"] for message in office.messages(told_of)]
    assert (told["data"]["webhook_id"], told["data"]["reason"]) == (webhook, shown["disabled_reason"])
    assert {row["status"] for row in office.history(automation)} <= {"held", "exhausted"}
    receiver.scripts.clear()
    recover = f"/v1/teams/acme/webhooks/{webhook}/recover"
    back = {"since": clock.iso(office.now - 13 * 86_400_000)}
    assert api.post(recover, json=back).status_code == 409
    api.patch(f"/v1/teams/acme/webhooks/{webhook}", json={"enabled": True})
    office.run()
    assert api.post(recover, json={"since": clock.iso(office.now - 15 * 86_400_000)}).status_code == 422
    assert api.post(recover, json=back).status_code == 200
    office.run()
    assert {row["status"] for row in office.history(automation)} == {"succeeded"}


def test_any_final_delivery_can_be_sent_again_under_its_id(
    office: Office, receiver: Receiver, api: TestClient
):
    delivery = office.fire(receiver.url())
    again = api.post(f"/v1/deliveries/{delivery}/redeliver")
    assert again.status_code == 200
    office.run()

    assert [got.headers["webhook-id"] for got in receiver.received] == [delivery, delivery]
    assert [got.headers["x-service-attempt"] for got in receiver.received] == ["1", "2"]
    assert [one["outcome"] for one in office.delivery(delivery)["attempts"]] == ["succeeded", "succeeded"]


def test_every_message_twice_is_one_post(office: Office, receiver: Receiver):
    office.automation(office.webhook(receiver.url()))
    office.alias(office.version(), "x")

    office.run(twice=True)

    assert len(receiver.received) == 1


def test_a_sender_killed_after_the_post_repeats_the_same_id_after_its_lease(
    office: Office, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    automation = office.automation(office.webhook(receiver.url()))
    office.alias(office.version(), "x")
    with monkeypatch.context() as patched:
        patched.setattr(sender._Tour, "_settle", _killed)
        with pytest.raises(Killed):
            _run_once(office)
    (row,) = office.history(automation)
    assert row["status"] == "attempting"

    deliveries.sweep(office.now)
    office.run()
    assert len(receiver.received) == 1
    office.turn(minutes=1)
    assert [one["outcome"] for one in office.delivery(row["id"])["attempts"]] == ["unknown"]
    deliveries.sweep(office.now)
    office.run()

    assert [got.headers["webhook-id"] for got in receiver.received] == [row["id"]] * 2
    shown = office.delivery(row["id"])
    assert shown["status"] == "succeeded"
    assert [one["outcome"] for one in shown["attempts"]] == ["unknown", "succeeded"]


def test_a_message_that_was_lost_is_rung_for_again(office: Office, receiver: Receiver):
    automation = office.automation(office.webhook(receiver.url()))
    office.alias(office.version(), "x")
    for message in office.messages(settings().event_queue_url):
        _match(message)
    office.messages(settings().delivery_queue_url)

    office.turn(seconds=61)
    deliveries.sweep(office.now)
    office.run()

    assert [row["status"] for row in office.history(automation)] == ["succeeded"]


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
    office: Office, receiver: Receiver, api: TestClient
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
        assert json.loads(office.delivery(delivery)["payload"]) == {"a": "production ", "b": "***"}


def test_an_answer_that_cannot_be_read_is_quoted_without_the_secrets(office: Office, receiver: Receiver):
    office.secret("TOKEN", "ghp_secret")
    told = raw(b"HTTP/1.1 200 OK\r\nBearer ghp_secret\r\n\r\n")

    shown = office.delivery(office.fire(receiver.on("/hook", told), access_token="TOKEN"))

    assert shown["status"] == "pending" and "***" in shown["attempts"][0]["error"]
    assert "ghp_secret" not in json.dumps(shown)


def test_fixing_the_url_heals_what_is_pending(office: Office, receiver: Receiver, api: TestClient):
    delivery = office.fire(receiver.always("/broken", answer(500)))
    webhook = office.row(delivery).webhook_id
    assert (
        api.patch(f"/v1/teams/acme/webhooks/{webhook}", json={"url": receiver.url("/mended")}).status_code
        == 200
    )

    office.due(delivery)

    assert len(receiver.at("/mended")) == 1
    assert office.delivery(delivery)["status"] == "succeeded"


def test_what_an_automation_still_had_to_deliver_is_cancelled_with_it(
    office: Office, receiver: Receiver, api: TestClient
):
    delivery = office.fire(receiver.always("/hook", answer(500)))
    assert api.delete(f"/v1/automations/{office.row(delivery).automation_id}").status_code == 200

    office.due(delivery)

    assert office.delivery(delivery)["status"] == "cancelled"
    assert len(receiver.received) == 1
    assert api.post(f"/v1/deliveries/{delivery}/redeliver").status_code == 409


def test_a_body_that_becomes_too_large_is_rejected_without_a_post(office: Office, receiver: Receiver):
    automation = office.automation(
        office.webhook(receiver.url()), payload=json.dumps({"t": "${artifact_metadata.big}" * 10})
    )
    office.alias(office.version(big="x" * 60_000), "x")
    office.run()

    (row,) = office.history(automation)
    assert row["status"] == "rejected" and "256 KB" in row["reason"]
    assert receiver.received == []


def test_a_loop_is_stopped_at_sixty_a_minute(
    office: Office, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(settings(), "fires_per_minute", 3)
    automation = office.automation(office.webhook(receiver.url()))
    version = office.version()
    for number in range(5):
        office.alias(version, f"a{number}")
    office.run()

    statuses = [row["status"] for row in office.history(automation)]
    assert sorted(statuses) == ["skipped_rate"] * 2 + ["succeeded"] * 3
    assert len(receiver.received) == 3
    office.turn(minutes=1)
    office.alias(version, "later")
    office.run()
    assert len(receiver.received) == 4
    skipped = next(row for row in office.history(automation) if row["status"] == "skipped_rate")
    assert office.api.post(f"/v1/deliveries/{skipped['id']}/redeliver").status_code == 200
    office.run()
    assert office.delivery(skipped["id"])["status"] == "succeeded" and len(receiver.received) == 5


def test_time_outs_in_a_row_pause_a_webhook_without_spending_attempts(
    office: Office, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(settings(), "webhook_seconds", 0.2)
    webhook = office.webhook(receiver.always("/hook", drip(b"", every=1)))
    automation = office.automation(webhook)
    version = office.version()
    for number in range(7):
        office.alias(version, f"a{number}")
    office.run()

    rows = [office.row(row["id"]) for row in office.history(automation)]
    assert sorted(row.attempts for row in rows) == [0, 0, 1, 1, 1, 1, 1]
    assert len(receiver.received) == 5
    hook = table.get(Webhook, webhook)
    assert hook is not None and hook.paused_until == pytest.approx(office.now + 60_000, abs=5000)
    assert all(row.due_at >= (hook.paused_until or 0) for row in rows if row.attempts == 0)


def test_no_more_than_ten_are_in_flight_and_the_rest_follow_at_once(
    office: Office, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    webhook = office.webhook(receiver.url())
    automation = office.automation(webhook)
    version = office.version()
    for number in range(4):
        office.alias(version, f"a{number}")
    for message in office.messages(settings().event_queue_url):
        _match(message)
    monkeypatch.setattr(settings(), "webhook_in_flight", 1)
    taken = Slot(webhook_id=webhook, number=0, until=office.now + 30_000, expires=0)
    table.write(table.Put(taken))

    office.run()
    assert receiver.received == []
    assert len(table.children(Waiting, webhook, limit=10)) == 4
    table.write(table.Delete(Slot, (webhook, 0)))
    row = office.row(office.history(automation)[0]["id"])
    sender.send(Ring.of(row, line=True), now=office.now)

    assert len(receiver.received) == 4
    assert {row["status"] for row in office.history(automation)} == {"succeeded"}
    assert table.children(Waiting, webhook, limit=10) == table.children(Slot, webhook, limit=10) == []


def test_more_deliveries_of_a_webhook_in_one_call_than_it_has_places_go_one_after_the_other(
    office: Office, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(settings(), "webhook_in_flight", 2)
    webhook = office.webhook(receiver.url())
    automations = [office.automation(webhook) for _ in range(7)]
    office.alias(office.version(), "x")

    office.run()

    assert len({got.headers["webhook-id"] for got in receiver.received}) == len(receiver.received) == 7
    assert {office.history(one)[0]["status"] for one in automations} == {"succeeded"}
    assert table.children(Waiting, webhook, limit=10) == table.children(Slot, webhook, limit=10) == []


def test_a_call_whose_deliveries_find_no_place_ends_soon_and_who_holds_the_place_goes_on_with_them(
    office: Office, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(settings(), "webhook_in_flight", 1)
    monkeypatch.setattr(settings(), "webhook_seconds", 4.0)
    receiver.on("/hook", drip(b"", every=0.5))
    automation = office.automation(office.webhook(receiver.url()))
    version = office.version()
    messages = []
    for number in range(2):
        office.alias(version, f"a{number}")
        for message in office.messages(settings().event_queue_url):
            _match(message)
        messages += office.messages(settings().delivery_queue_url)
    first = threading.Thread(target=_send, args=(messages[0],))
    first.start()
    while not receiver.received:
        time.sleep(0.01)

    began = time.monotonic()
    _send(messages[1])
    took = time.monotonic() - began
    assert first.is_alive() and took < 3
    first.join()

    assert len(receiver.received) == 2
    assert {row["status"] for row in office.history(automation)} == {"succeeded", "pending"}


def test_what_aws_keeps_us_from_sending_comes_back_and_is_sent_then(
    office: Office, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    automation = office.automation(office.webhook(receiver.url()))
    office.alias(office.version(), "x")
    for message in office.messages(settings().event_queue_url):
        _match(message)
    (message,) = office.messages(settings().delivery_queue_url)
    event = {"Records": [{"messageId": "m", "body": message["Body"]}]}
    torn = {"messageId": "torn", "body": "{"}
    module = doors.module("webhook_sender")
    with monkeypatch.context() as patched:
        patched.setattr(settings(), "table_name", "elsewhere")
        assert module.send(event, None) == {"batchItemFailures": [{"itemIdentifier": "m"}]}
    assert receiver.received == []

    answered = module.send({"Records": [torn, *event["Records"]]}, None)

    assert answered == {"batchItemFailures": [{"itemIdentifier": "torn"}]}

    assert [row["status"] for row in office.history(automation)] == ["succeeded"]


def test_a_webhook_that_holds_all_its_places_delays_nobody_else(office: Office, receiver: Receiver):
    slow, fast = office.webhook(receiver.url("/slow")), office.webhook(receiver.url("/fast"))
    office.automation(slow)
    office.automation(fast)
    for number in range(settings().webhook_in_flight):
        table.write(table.Put(Slot(webhook_id=slow, number=number, until=office.now + 30_000, expires=0)))

    office.alias(office.version(), "x")
    office.run()

    assert [got.path for got in receiver.received] == ["/fast"]


def test_a_batch_with_a_slow_endpoint_in_it_delivers_the_others_at_once(
    office: Office, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(settings(), "webhook_seconds", 6.0)
    office.automation(office.webhook(receiver.always("/slow", drip(b"", every=0.5))))
    fast = [office.automation(office.webhook(receiver.url(f"/{number}"))) for number in range(4)]
    office.alias(office.version(), "x")
    for message in office.messages(settings().event_queue_url):
        _match(message)
    messages = office.messages(settings().delivery_queue_url)
    records = [{"messageId": message["MessageId"], "body": message["Body"]} for message in messages]
    ended: dict[str, float] = {}

    def recorded(self: Any, results: list[sender.Result]) -> Any:
        found = original(self, results)
        ended.update({one.claimed.webhook.url: time.monotonic() - start for one in results})
        return found

    original, start = sender._Tour._record, time.monotonic()
    monkeypatch.setattr(sender._Tour, "_record", recorded)
    answered = doors.module("webhook_sender").send({"Records": records}, None)

    assert answered == {"batchItemFailures": []}
    assert {office.history(one)[0]["status"] for one in fast} == {"succeeded"}
    slow = ended.pop(receiver.url("/slow"))
    assert len(ended) == 4 and max(ended.values()) < 5 < slow


def test_many_automations_on_one_event_are_that_many_deliveries_whoever_is_killed(
    office: Office, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(matcher, "PAGE", 9)
    first = table.get(Automation, office.automation(office.webhook(receiver.url())))
    assert first is not None
    made = {first.id, *(ids.new() for _ in range(39))}
    for id in made:
        table.write(table.Put(first.model_copy(update={"id": id})))
    office.alias(office.version(), "x")
    sent = 0

    def killed_now_and_then(*rings: Any) -> None:
        nonlocal sent
        sent += 1
        if sent % 4 == 0:
            raise Killed
        original(*rings)

    original = sender.queues.ring
    monkeypatch.setattr(sender.queues, "ring", killed_now_and_then)
    while pending := office.messages(settings().event_queue_url):
        for message in pending:
            with contextlib.suppress(Killed):
                _match(message)
            with contextlib.suppress(Killed):
                _match(message)
    monkeypatch.setattr(sender.queues, "ring", original)
    office.turn(minutes=2)
    deliveries.sweep(office.now)
    office.run(twice=True)

    found = [got.headers["webhook-id"] for got in receiver.received]
    assert len(found) == len(set(found)) == 40
    assert {office.row(id).automation_id for id in found} == made


@pytest.mark.parametrize(
    "outcome", [one for one in Outcome if one not in (Outcome.SUCCEEDED, Outcome.BLOCKED)]
)
def test_every_failure_but_a_blocked_target_is_tried_again(outcome: Outcome):
    failed = Answer(outcome=outcome, error="Why.")

    first = retries.judge(failed, failures=0, now=0, schedule=[0, 5, 300], chance=0.5)
    last = retries.judge(failed, failures=2, now=0, schedule=[0, 5, 300], chance=0.5)

    assert first.status is DeliveryStatus.PENDING
    assert first.wait_ms == (60_000 if outcome is Outcome.TIMEOUT else 5500)
    assert last.status is DeliveryStatus.EXHAUSTED


def test_a_blocked_target_is_rejected_at_once(office: Office, receiver: Receiver):
    delivery = office.fire("http://169.254.169.254/latest")

    shown = office.delivery(delivery)
    assert shown["status"] == "rejected" and "169.254.169.254" in shown["reason"]
    assert shown["attempts"][0]["outcome"] == "blocked"


def test_twenty_deliveries_are_two_messages_and_a_handful_of_calls(
    office: Office, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    made = [office.automation(office.webhook(receiver.url(f"/{number}"))) for number in range(20)]
    office.alias(office.version(), "x")
    for message in office.messages(settings().event_queue_url):
        _match(message)
    messages = office.messages(settings().delivery_queue_url)
    records = [{"messageId": message["MessageId"], "body": message["Body"]} for message in messages]
    calls: list[str] = []
    original = botocore.client.BaseClient._make_api_call

    def counted(self: Any, operation: str, parameters: Any) -> Any:
        calls.append(operation)
        return original(self, operation, parameters)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", counted)
    doors.module("webhook_sender").send({"Records": records}, None)
    made_calls = list(calls)

    assert len(records) == 2 and len(receiver.received) == 20
    assert {office.history(one)[0]["status"] for one in made} == {"succeeded"}
    assert len(made_calls) < 20, made_calls


@pytest.mark.parametrize("effect", ["before it has an effect", "after it had its effect"])
def test_killed_at_any_call_on_the_way_an_event_is_delivered_once(
    office: Office, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, effect: str
):
    automation = office.automation(office.webhook(receiver.url()))
    version = office.version()
    original, countdown = botocore.client.BaseClient._make_api_call, -1

    def dying(self: Any, operation: str, parameters: Any) -> Any:
        nonlocal countdown
        countdown -= 1
        if countdown == 0 and effect.startswith("before"):
            raise Killed
        answer = original(self, operation, parameters)
        if countdown == 0:
            raise Killed
        return answer

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", dying)

    def handled(messages: list[dict[str, Any]], work: Any, calls: int) -> list[dict[str, Any]]:
        """Hand messages over, dying after so many calls; those that were not done with come back."""
        nonlocal countdown
        countdown = calls
        while messages:
            try:
                work(messages[0])
            except Killed:
                return messages
            messages = messages[1:]
        return []

    for calls in range(1, 16):
        posts, known = len(receiver.received), len(office.history(automation))
        office.alias(version, f"a{calls}")
        back = handled(office.messages(settings().event_queue_url), _match, calls)
        handled(back, _match, -1)
        back = handled(office.messages(settings().delivery_queue_url), _send, calls)
        handled(back, _send, -1)
        for _ in range(3):
            office.turn(seconds=61)
            deliveries.sweep(office.now)
            office.run()
        rows = office.history(automation)
        sent = receiver.received[posts:]
        assert len(rows) == known + 1 and rows[0]["status"] == "succeeded", calls
        assert {got.headers["webhook-id"] for got in sent} == {rows[0]["id"]}
        died_between = "unknown" in [one["outcome"] for one in office.delivery(rows[0]["id"])["attempts"]]
        assert len(sent) == 1 or (len(sent) == 2 and died_between), calls


class Killed(BaseException):
    """The process ends here."""


def _killed(*_: Any, **__: Any) -> None:
    raise Killed


def _match(message: dict[str, Any]) -> None:
    doors.modules()["webhook_sender"]._match(json.loads(message["Body"]))


def _send(message: dict[str, Any]) -> None:
    record = {"messageId": message["MessageId"], "body": message["Body"]}
    assert doors.modules()["webhook_sender"].send({"Records": [record]}, None) == {"batchItemFailures": []}


def _run_once(office: Office) -> None:
    for message in office.messages(settings().event_queue_url):
        _match(message)
    for message in office.messages(settings().delivery_queue_url):
        _send(message)


def _b64(raw_bytes: bytes) -> str:
    return base64.b64encode(raw_bytes).decode()
