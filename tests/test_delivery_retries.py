"""Deliveries that fail: when they are tried again, how often, and what counts as a success."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tuneyard import deliveries, retries, table
from tuneyard.settings import settings
from tuneyard.webhook_records import Answer, DeliveryStatus, Outcome, Webhook
from webhook_fixtures import Office, Receiver, answer, configured, drip, office, raw, receiver, reset  # noqa: F401


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
