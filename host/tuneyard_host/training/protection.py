"""On Amazon ECS: a trainer in the middle of a job is not the one that goes when fewer are needed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from aws_lambda_powertools import Logger

logger = Logger(service="trainer")
_MINUTES = 60 * 24


@contextmanager
def protected() -> Iterator[None]:
    """Within this block the task that this process runs in is protected from scale-in; elsewhere than on ECS, nothing.

    By the agent's endpoint for that, ``$ECS_AGENT_URI/task-protection/v1/state``. A trainer that gets no protection
    works on: whoever ends it, its job goes on elsewhere.
    """
    agent = os.environ.get("ECS_AGENT_URI")
    if not agent:
        yield
        return
    _ask(agent, {"ProtectionEnabled": True, "ExpiresInMinutes": _MINUTES})
    try:
        yield
    finally:
        _ask(agent, {"ProtectionEnabled": False})


def _ask(agent: str, wanted: dict[str, bool | int]) -> None:
    try:
        httpx.put(f"{agent}/task-protection/v1/state", json=wanted, timeout=5).raise_for_status()
    except httpx.HTTPError:
        logger.warning("ECS does not protect this task", exc_info=True)
