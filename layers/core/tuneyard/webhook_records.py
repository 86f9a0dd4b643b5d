"""What is stored of webhooks, automations and deliveries. Times are milliseconds since 1970 (UTC)."""

from __future__ import annotations

import zlib
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, Field, FiniteFloat

from tuneyard.records import EventType, Record

SHARDS = 8
"""Partitions of the index of due deliveries: one takes about 300 deliveries a second."""


class Secret(Record):
    """The name of a stored secret; its value lies in Secrets Manager under ``id`` and is never shown again."""

    team: str
    name: str
    id: str
    fits_header: bool
    """Whether the value may stand in an HTTP header, as an access token does."""
    as_token: int = 0
    """Webhooks that send it as their access token."""
    as_secret: int = 0
    """Webhooks that sign with it."""
    created_at: int
    created_by: str
    updated_at: int


class Webhook(Record):
    """Where a team wants its events, and how the endpoint has been doing lately."""

    id: str
    team: str
    name: str
    url: str
    access_token: str | None = None
    access_token_id: str | None = None
    """Where the value of the secret of this name lies; the secret cannot be deleted while it is used."""
    secret: str | None = None
    secret_id: str | None = None
    previous_secret_id: str | None = None
    previous_until: int | None = None
    """Until when the secret that was attached before signs as well."""
    created_at: int
    created_by: str
    updated_at: int
    rev: int = 0
    """Counts the changes of its owner, so that two of them cannot overwrite each other."""
    automations: int = 0
    enabled: bool = True
    enabled_at: int
    disabled_at: int | None = None
    disabled_reason: str | None = None
    last_success_at: int | None = None
    failing_since: int | None = None
    failures: int = 0
    """Attempts that failed since the last success."""
    timeouts: int = 0
    """Attempts in a row that ran out of time."""
    paused_until: int | None = None


class Slot(Record):
    """One of the places in flight of a webhook, taken until its sender gives it back or is taken for dead."""

    webhook_id: str
    number: int
    until: int
    line: bool | None = None
    """Set by who found every place taken and stands in line: whoever gives this one back goes on with the line."""
    expires: int


class Waiting(Record):
    """A delivery that is due and found every place in flight taken; whoever gives one back takes it on."""

    webhook_id: str
    since: int
    delivery_id: str
    rev: int
    automation_id: str
    event_id: str
    expires: int


class Comparison(StrEnum):
    """How a metric is held against its threshold."""

    GREATER = ">"
    AT_LEAST = ">="
    LESS = "<"
    AT_MOST = "<="
    EQUAL = "=="
    OTHER = "!="


class MetricRule(BaseModel):
    """When a run metric fires: its last values, made one number, against a threshold."""

    name: str = Field(min_length=1, max_length=256)
    aggregate: Literal["last", "min", "max", "avg"] = "last"
    window: int = Field(5, ge=1, le=100)
    comparison: Comparison
    threshold: FiniteFloat


class Automation(Record):
    """What sends which webhook when."""

    id: str
    team: str
    name: str
    description: str | None = None
    scope: str
    """The ``entity/project`` that it listens to; a registry is a project of its team."""
    event: EventType
    alias_regex: str | None = None
    tag_regex: str | None = None
    run_user: str | None = None
    run_name_regex: str | None = None
    run_states: list[str] = Field(default_factory=list)
    metric: MetricRule | None = None
    webhook_id: str
    payload: str | None = None
    enabled: bool = True
    created_at: int
    created_by: str
    updated_at: int
    rev: int = 0


class Pace(Record):
    """How often an automation fired in a minute: the guard against loops."""

    automation_id: str
    minute: int
    fired: int


class Fired(Record):
    """When a run-metric automation last fired for a run: once a day is enough."""

    automation_id: str
    run_id: str
    event_id: str
    at: int
    expires: int


class DeliveryStatus(StrEnum):
    """Where a delivery stands; all but the first two are final until somebody sends it again."""

    PENDING = "pending"
    ATTEMPTING = "attempting"
    SUCCEEDED = "succeeded"
    EXHAUSTED = "exhausted"
    REJECTED = "rejected"
    HELD = "held"
    CANCELLED = "cancelled"
    SKIPPED_RATE = "skipped_rate"

    @property
    def open(self) -> bool:
        """Whether it is still on its way."""
        return self in (DeliveryStatus.PENDING, DeliveryStatus.ATTEMPTING)


class Delivery(Record):
    """One event on its way to one webhook: this row is the queue, and messages only ring for it."""

    id: str
    team: str
    webhook_id: str
    automation_id: str
    event_id: str
    event_type: EventType
    status: DeliveryStatus
    rev: int = 0
    """Counts its changes: every change names the one it was decided on, and so does every message."""
    template: str | None = None
    values: dict[str, str] = Field(default_factory=dict)
    """The variables that are not the event's own: what a metric came to."""
    created_at: int
    due_at: int
    rung: bool = True
    """Whether a message for ``due_at`` was sent; what is due later than a message can wait is rung for by the sweep."""
    attempts: int = 0
    failures: int = 0
    """Attempts that failed since it was made or sent again: its place in the schedule."""
    unknowns: int = 0
    """Attempts whose sender was gone before it could say how they ended."""
    claimed_at: int | None = None
    lease_until: int | None = None
    finished_at: int | None = None
    last_status: int | None = None
    reason: str | None = None
    expires: int

    @property
    def shard(self) -> int:
        """Its partition in the index of due deliveries."""
        return zlib.crc32(self.id.encode()) % SHARDS


class Outcome(StrEnum):
    """How an attempt ended."""

    SUCCEEDED = "succeeded"
    HTTP = "http_error"
    DNS = "dns_error"
    CONNECT = "connect_error"
    TLS = "tls_error"
    TIMEOUT = "timeout"
    BLOCKED = "blocked"
    CREDENTIALS = "credentials_error"
    UNKNOWN = "unknown"


class Attempt(Record):
    """One try of a delivery, with the head of what the endpoint answered; secrets are masked in it."""

    delivery_id: str
    number: int
    outcome: Outcome
    url: str
    started_at: int
    duration_ms: int | None = None
    status_code: int | None = None
    headers: list[tuple[str, str]] = Field(default_factory=list)
    body: str = ""
    error: str | None = None
    expires: int


class Answer(BaseModel):
    """What came of one request: a status and the head of the answer, or what failed."""

    outcome: Outcome
    status_code: int | None = None
    headers: list[tuple[str, str]] = Field(default_factory=list)
    body: bytes = b""
    error: str | None = None
    duration_ms: int = 0

    def header(self, name: str) -> str | None:
        """The first header of this name, or None."""
        return next((value for key, value in self.headers if key.lower() == name), None)
