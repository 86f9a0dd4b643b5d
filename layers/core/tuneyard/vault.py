"""Secrets Manager: the values of team secrets, and nothing else of them.

One document holds a value and, for a while after it was replaced, the one before it, so that both change at once.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, NamedTuple

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tuneyard.once import Once
from tuneyard.settings import settings

if TYPE_CHECKING:
    from mypy_boto3_secretsmanager import SecretsManagerClient

SECONDS_REMEMBERED = 60
_remembered: dict[str, tuple[float, Stored]] = {}


class Unreadable(Exception):
    """The value cannot be had now; its text says why, without the value."""


class Stored(NamedTuple):
    """A value, and the one before it that still counts until ``previous_until`` (milliseconds since 1970)."""

    value: str
    previous: str | None = None
    previous_until: int = 0

    def values(self, now: int) -> list[str]:
        """The values that count now, the newest first."""
        return [
            self.value,
            *([self.previous] if self.previous is not None and now < self.previous_until else []),
        ]


@Once
def _client() -> SecretsManagerClient:
    patience = Config(connect_timeout=2, read_timeout=3, retries={"mode": "standard", "max_attempts": 2})
    return boto3.client("secretsmanager", config=patience)


def create(team: str, secret_id: str, stored: Stored) -> None:
    """Store a value under an id that was never used."""
    _client().create_secret(Name=_name(team, secret_id), SecretString=json.dumps(stored))


def replace(team: str, secret_id: str, stored: Stored) -> None:
    """Store another value; readers may have the old one for up to a minute."""
    _client().put_secret_value(SecretId=_name(team, secret_id), SecretString=json.dumps(stored))
    _remembered.pop(_name(team, secret_id), None)


def read(team: str, secret_id: str, *, fresh: bool = False) -> Stored:
    """The value, as it was within the last minute; Unreadable when it cannot be had."""
    name = _name(team, secret_id)
    until, stored = _remembered.get(name, (0.0, None))
    if stored is not None and not fresh and time.monotonic() < until:
        return stored
    try:
        stored = Stored(*json.loads(_client().get_secret_value(SecretId=name)["SecretString"]))
    except ClientError as error:
        raise Unreadable(error.response["Error"]["Code"]) from error
    except BotoCoreError as error:
        raise Unreadable(type(error).__name__) from error
    if len(_remembered) > 10_000:
        _remembered.clear()
    _remembered[name] = (time.monotonic() + SECONDS_REMEMBERED, stored)
    return stored


def delete(team: str, secret_id: str) -> None:
    """Delete a value for good; one that is gone already is left alone."""
    try:
        _client().delete_secret(SecretId=_name(team, secret_id), ForceDeleteWithoutRecovery=True)
    except ClientError as error:
        if error.response["Error"]["Code"] != "ResourceNotFoundException":
            raise
    _remembered.pop(_name(team, secret_id), None)


def forget() -> None:
    """Read every value again at its next use."""
    _remembered.clear()


def _name(team: str, secret_id: str) -> str:
    return f"{settings().secret_prefix}/{team}/{secret_id}"
