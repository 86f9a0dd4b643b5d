"""One attempt at a delivery: the request in its own thread, and what follows from the answer for the delivery."""

from __future__ import annotations

import random
from typing import NamedTuple

from tuneyard import deliveries, payloads, posts, queues, retries, table
from tuneyard.queues import Ring
from tuneyard.records import ArtifactEvent
from tuneyard.settings import settings
from tuneyard.webhook_records import Answer, Attempt, Delivery, DeliveryStatus, Outcome, Webhook

Sent = Answer | payloads.Unrenderable


class Claimed(NamedTuple):
    """A delivery that is ours until its lease ends, in a place in flight."""

    ring: Ring
    delivery: Delivery
    webhook: Webhook
    event: ArtifactEvent
    slot: int


class Result(NamedTuple):
    """What came of an attempt, the delivery as it is afterwards, and the writes that make it so."""

    claimed: Claimed
    after: Delivery
    writes: list[table.Put]
    answer: Answer | None = None
    verdict: retries.Verdict | None = None


def post(claimed: Claimed, *, now: int) -> Sent:
    """Send the request; what the endpoint answered, or why there is nothing to send."""
    delivery = claimed.delivery
    message = posts.Message(delivery.id, delivery.attempts, claimed.event, delivery.template, delivery.values)
    try:
        return posts.send(claimed.webhook, message, now=now)
    except payloads.Unrenderable as error:
        return error


def result(claimed: Claimed, sent: Sent, *, now: int) -> Result:
    """What follows from the answer: whether and when the delivery is tried again, and the rows to write."""
    delivery = claimed.delivery
    if isinstance(sent, payloads.Unrenderable):
        after, write = deliveries.moved(
            delivery,
            status=DeliveryStatus.REJECTED,
            reason=str(sent),
            finished_at=now,
            lease_until=None,
            claimed_at=None,
        )
        return Result(claimed, after, [write])
    verdict = retries.judge(
        sent,
        failures=delivery.failures,
        now=now,
        schedule=settings().webhook_schedule,
        chance=random.random(),
    )
    again = verdict.status is DeliveryStatus.PENDING
    after, write = deliveries.moved(
        delivery,
        status=verdict.status,
        reason=verdict.reason,
        failures=delivery.failures + (sent.outcome is not Outcome.SUCCEEDED),
        last_status=sent.status_code,
        due_at=now + verdict.wait_ms if again else delivery.due_at,
        rung=verdict.wait_ms <= queues.LONGEST_DELAY * 1000,
        finished_at=None if again else now,
        lease_until=None,
        claimed_at=None,
    )
    attempt = _attempt_of(delivery, claimed.webhook, sent)
    return Result(claimed, after, [write, table.Put(attempt)], sent, verdict)


def _attempt_of(delivery: Delivery, webhook: Webhook, answer: Answer) -> Attempt:
    return Attempt(
        delivery_id=delivery.id,
        number=delivery.attempts,
        outcome=answer.outcome,
        url=webhook.url,
        started_at=delivery.claimed_at or delivery.due_at,
        duration_ms=answer.duration_ms,
        status_code=answer.status_code,
        headers=answer.headers,
        body=answer.body.decode(errors="replace"),
        error=answer.error,
        expires=delivery.expires,
    )
