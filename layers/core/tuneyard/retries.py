"""What follows from an attempt: is the delivery done, over, or tried again, and when."""

from __future__ import annotations

from email.utils import parsedate_to_datetime
from typing import NamedTuple

from tuneyard.webhook_records import Answer, DeliveryStatus, Outcome, Webhook

LONGEST_RETRY_AFTER_MS = 6 * 3_600_000
LEAST_WAIT_MS = 60_000
TIMEOUTS_BEFORE_PAUSE = 5
PAUSE_MS = 60_000
_DAY_MS = 24 * 3_600_000


class Verdict(NamedTuple):
    """What becomes of a delivery; ``wait_ms`` is how long a pending one waits, ``gone`` that its endpoint said 410."""

    status: DeliveryStatus
    reason: str | None = None
    wait_ms: int = 0
    gone: bool = False


def judge(answer: Answer, *, failures: int, now: int, schedule: list[int], chance: float) -> Verdict:
    """The verdict on an attempt after ``failures`` earlier ones; ``chance`` in [0, 1) spreads the retries.

    The wait is that of the schedule and up to a fifth more, longer where the endpoint asks for it by ``Retry-After``
    or shows that it has too much to do.
    """
    status = answer.status_code
    if answer.outcome is Outcome.SUCCEEDED:
        return Verdict(DeliveryStatus.SUCCEEDED)
    if answer.outcome is Outcome.BLOCKED:
        return Verdict(DeliveryStatus.REJECTED, answer.error)
    if status == 410:
        return Verdict(DeliveryStatus.REJECTED, "The endpoint answered 410: it is gone for good.", gone=True)
    if failures + 1 >= len(schedule):
        return Verdict(
            DeliveryStatus.EXHAUSTED, f"{failures + 1} attempts failed; the last one: {answer.error}"
        )
    wait = round(schedule[failures + 1] * 1000 * (1 + 0.2 * chance))
    asked = retry_after(answer, now) if status in (429, 503) else None
    if asked is not None:
        wait = max(wait, min(asked, LONGEST_RETRY_AFTER_MS))
    elif answer.outcome is Outcome.TIMEOUT or status == 429:
        wait = max(wait, LEAST_WAIT_MS)
    return Verdict(DeliveryStatus.PENDING, answer.error, wait)


def retry_after(answer: Answer, now: int) -> int | None:
    """The milliseconds that an endpoint asks us to wait, by number or by date; None when it does not say so."""
    text = (answer.header("retry-after") or "").strip()
    if text.isascii() and text.isdigit():
        return int(text[:9]) * 1000
    try:
        return max(0, round(parsedate_to_datetime(text).timestamp() * 1000) - now)
    except (ValueError, OverflowError):
        return None


def why_disable(webhook: Webhook, now: int) -> str | None:
    """The sentence that a webhook is disabled with, or None while there is hope.

    No success for 5 days, and at least 10 failures over at least 12 hours: a quiet week alone disables nothing.
    """
    since = webhook.failing_since
    if since is None or webhook.failures < 10 or now - since < _DAY_MS // 2:
        return None
    if now - max(webhook.last_success_at or 0, webhook.enabled_at) < 5 * _DAY_MS:
        return None
    return (
        f"No delivery succeeded for 5 days, and the last {webhook.failures} attempts failed. Look at the deliveries, "
        "mend the endpoint, then enable the webhook again."
    )
