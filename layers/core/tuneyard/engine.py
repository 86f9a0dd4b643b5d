"""The inference service, as the control plane reaches it."""

from __future__ import annotations

from typing import NamedTuple

from tuneyard.errors import Unavailable
from tuneyard.settings import settings


class Operation(NamedTuple):
    """Where to POST to, and with which headers."""

    url: str
    headers: dict[str, str]


def operation(path: str) -> Operation:
    """One of the service's operations, with its token; Unavailable where there is no service."""
    if not settings().inference_engine_url:
        raise Unavailable("No inference service is configured: set InferenceEngineUrl.", retry_after=30)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {settings().engine_token}"}
    return Operation(f"{settings().inference_engine_url}{path}", headers)


def silent() -> Unavailable:
    """What a client hears when the service cannot be reached."""
    return Unavailable("The inference service does not answer. Try again in a moment.", retry_after=2)
