"""Deliveries whose sender dies, whose messages are lost or come twice, or whom AWS lets down."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from tuneyard import deliveries, ids, matcher, table
from tuneyard.settings import settings
from tuneyard.webhook_records import Automation
from tuneyard_host.local import doors
from webhook_fixtures import Killed, Office, Receiver, aws_calls, configured, match, office, receiver, send  # noqa: F401


def test_every_message_twice_is_one_post(office: Office, receiver: Receiver):
    office.automation(office.webhook(receiver.url()))
    office.alias(office.version(), "x")

    office.run(twice=True)

    assert len(receiver.received) == 1


def test_a_sender_killed_after_the_post_repeats_the_same_id_after_its_lease(
    office: Office, receiver: Receiver
):
    automation = office.automation(office.webhook(receiver.url()))
    office.alias(office.version(), "x")
    (message,) = office.matched()

    def killed(*_: Any) -> None:
        if receiver.received:
            raise Killed

    with aws_calls(before=killed), pytest.raises(Killed):
        send(message)
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
    office.matched()

    office.turn(seconds=61)
    deliveries.sweep(office.now)
    office.run()

    assert [row["status"] for row in office.history(automation)] == ["succeeded"]


def test_what_aws_keeps_us_from_sending_comes_back_and_is_sent_then(
    office: Office, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    automation = office.automation(office.webhook(receiver.url()))
    office.alias(office.version(), "x")
    (message,) = office.matched()
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

    def killed_now_and_then(_: str, parameters: Any) -> None:
        nonlocal sent
        sent += parameters.get("QueueUrl") == settings().delivery_queue_url
        if sent % 4 == 3:
            sent += 1
            raise Killed

    while pending := office.messages(settings().event_queue_url):
        for message in pending * 2:
            with aws_calls(before=killed_now_and_then), contextlib.suppress(Killed):
                match(message)
    assert sent > 4
    office.turn(minutes=2)
    deliveries.sweep(office.now)
    office.run(twice=True)

    found = [got.headers["webhook-id"] for got in receiver.received]
    assert len(found) == len(set(found)) == 40
    assert {office.row(id).automation_id for id in found} == made


@pytest.mark.parametrize("effect", ["before it has an effect", "after it had its effect"])
def test_killed_at_any_call_on_the_way_an_event_is_delivered_once(
    office: Office, receiver: Receiver, effect: str
):
    automation = office.automation(office.webhook(receiver.url()))
    version = office.version()

    def handled(messages: list[dict[str, Any]], work: Any, calls: int) -> list[dict[str, Any]]:
        """Hand messages over, dying at the so-manieth call; those that were not done with come back."""
        countdown = calls

        def dying(*_: Any) -> None:
            nonlocal countdown
            countdown -= 1
            if countdown == 0:
                raise Killed

        when = {"before": dying} if effect.startswith("before") else {"after": dying}
        with aws_calls(**when):
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
        back = handled(office.messages(settings().event_queue_url), match, calls)
        handled(back, match, -1)
        back = handled(office.messages(settings().delivery_queue_url), send, calls)
        handled(back, send, -1)
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
