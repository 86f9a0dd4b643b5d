"""Places in flight: how many requests a webhook gets at a time, who waits for one, and that nobody else waits."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from tuneyard import sender, table
from tuneyard.queues import Ring
from tuneyard.settings import settings
from tuneyard.webhook_records import Slot, Waiting
from tuneyard_host.local import doors
from webhook_fixtures import Office, Receiver, aws_calls, configured, drip, office, receiver, send  # noqa: F401


def test_no_more_than_ten_are_in_flight_and_the_rest_follow_at_once(
    office: Office, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    webhook = office.webhook(receiver.url())
    automation = office.automation(webhook)
    version = office.version()
    for number in range(4):
        office.alias(version, f"a{number}")
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
        messages += office.matched()
    first = threading.Thread(target=send, args=(messages[0],))
    first.start()
    while not receiver.received:
        time.sleep(0.01)

    began = time.monotonic()
    send(messages[1])
    took = time.monotonic() - began
    assert first.is_alive() and took < 3
    first.join()

    assert len(receiver.received) == 2
    assert {row["status"] for row in office.history(automation)} == {"succeeded", "pending"}


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
    messages = office.matched()
    records = [{"messageId": message["MessageId"], "body": message["Body"]} for message in messages]
    ended: dict[str, float] = {}
    start = time.monotonic()

    def recorded(operation: str, parameters: Any) -> None:
        written = json.dumps(parameters) if operation == "TransactWriteItems" else ""
        paths = [path for path in ("/slow", "/0", "/1", "/2", "/3") if receiver.url(path) in written]
        ended.update({path: time.monotonic() - start for path in paths})

    with aws_calls(after=recorded):
        answered = doors.module("webhook_sender").send({"Records": records}, None)

    assert answered == {"batchItemFailures": []}
    assert {office.history(one)[0]["status"] for one in fast} == {"succeeded"}
    slow = ended.pop("/slow")
    assert len(ended) == 4 and max(ended.values()) < 5 < slow


def test_twenty_deliveries_are_two_messages_and_a_handful_of_calls(
    office: Office, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    made = [office.automation(office.webhook(receiver.url(f"/{number}"))) for number in range(20)]
    office.alias(office.version(), "x")
    messages = office.matched()
    records = [{"messageId": message["MessageId"], "body": message["Body"]} for message in messages]
    calls: list[str] = []

    with aws_calls(before=lambda operation, _: calls.append(operation)):
        doors.module("webhook_sender").send({"Records": records}, None)

    assert len(records) == 2 and len(receiver.received) == 20
    assert {office.history(one)[0]["status"] for one in made} == {"succeeded"}
    assert len(calls) < 20, calls
