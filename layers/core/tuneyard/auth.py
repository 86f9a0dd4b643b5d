"""Who is calling."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.concurrency import run_in_threadpool

from tuneyard import teams
from tuneyard.errors import Unauthorized
from tuneyard.records import Identity

_SECONDS_REMEMBERED = 30
_bearer = HTTPBearer(auto_error=False, description="An API key of your team.")
_remembered: dict[str, tuple[float, Identity]] = {}


async def identify(credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> Identity:
    """The caller of this request; Unauthorized without a key that we know.

    A key is looked up at most every 30 seconds, so a revoked one works no longer than that.
    """
    if credentials is None:
        raise Unauthorized("No API key was sent. Send the header `Authorization: Bearer <key>`.")
    text = credentials.credentials
    until, identity = _remembered.get(teams.digest(text), (0.0, None))
    if identity is not None and time.monotonic() < until:
        return identity
    key = await run_in_threadpool(teams.find_key, text)
    if key is None:
        _remembered.pop(teams.digest(text), None)
        raise Unauthorized(
            "This API key is unknown or was revoked. Check the key, or ask your team's administrator."
        )
    identity = Identity(team=key.team, user=key.user, role=key.role, key_id=key.id)
    if len(_remembered) > 10_000:
        _remembered.clear()
    _remembered[key.hash] = (time.monotonic() + _SECONDS_REMEMBERED, identity)
    return identity


def forget() -> None:
    """Look every key up again at its next use."""
    _remembered.clear()


Caller = Annotated[Identity, Depends(identify)]
