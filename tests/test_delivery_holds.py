"""Webhooks that are disabled, held deliveries, those that are recovered or cancelled, and loops."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tuneyard import clock, deliveries
from tuneyard.settings import settings
from tuneyard.webhook_records import DeliveryStatus
from webhook_fixtures import Office, Receiver, answer, aws_calls, configured, office, receiver  # noqa: F401


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
    office: Office, receiver: Receiver, api: TestClient
):
    webhook = office.webhook(receiver.url())
    automation = office.automation(webhook)
    path = f"/v1/teams/acme/webhooks/{webhook}"
    api.patch(path, json={"enabled": False})
    office.alias(office.version(), "x")
    enabled: list[Any] = []

    def too_late(operation: str, parameters: Any) -> None:
        if operation == "TransactWriteItems" and "held" in json.dumps(parameters) and not enabled:
            enabled.append(path)
            assert api.patch(path, json={"enabled": True}).status_code == 200

    with aws_calls(before=too_late):
        office.run()
    assert enabled
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


def test_what_an_automation_still_had_to_deliver_is_cancelled_with_it_and_stays_readable(
    office: Office, receiver: Receiver, api: TestClient, stranger: dict[str, str]
):
    delivery = office.fire(receiver.always("/hook", answer(500)))
    row = office.row(delivery)
    assert api.delete(f"/v1/automations/{row.automation_id}").status_code == 200
    assert api.delete(f"/v1/teams/acme/webhooks/{row.webhook_id}").status_code == 200

    office.due(delivery)

    assert office.delivery(delivery)["status"] == "cancelled"
    assert len(receiver.received) == 1
    assert api.post(f"/v1/deliveries/{delivery}/redeliver").status_code == 409
    history = f"webhooks/{row.webhook_id}/deliveries"
    assert [one["id"] for one in api.get(f"/v1/teams/acme/{history}").json()["data"]] == [delivery]
    assert api.get(f"/v1/teams/rivals/{history}", headers=stranger).status_code == 404


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
