"""Waiting until a part serves, and giving up with a sentence when it keeps dying or takes too long."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx

from tuneyard_host.local.folder import LocalError
from tuneyard_host.local.processes import Supervisor

SECONDS, MOST_DEATHS = 180.0, 3


def wait_for_answer(url: str, supervisor: Supervisor) -> None:
    """Return when this address answers 200."""
    with httpx.Client(timeout=2, trust_env=False) as client:
        _until(lambda: _ok(client, url), supervisor)


def wait(base_url: str, supervisor: Supervisor, *, worker: str, since: float) -> None:
    """Return when the system check is well, the trainer has reported since this start, and a base model answers."""
    from tuneyard import table
    from tuneyard.records import Worker
    from tuneyard.settings import settings

    def trainer_seen() -> bool:
        row = table.get(Worker, "trainer", worker)
        return row is not None and row.seen_at > since * 1000

    with httpx.Client(timeout=6, trust_env=False) as client:
        _until(trainer_seen, supervisor)
        _until(lambda: _ok(client, f"{base_url}/v1/system-check"), supervisor)
        engine, models = settings().inference_engine_url, settings().base_models
        _until(lambda: models[0].id in client.get(f"{engine}/health").json()["engines"], supervisor)


def save(endpoint: str) -> None:
    """Have the emulator write a snapshot now."""
    from tuneyard_host.local.emulator import SAVE

    httpx.post(endpoint + SAVE, timeout=60, trust_env=False).raise_for_status()


def _ok(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == 200
    except httpx.TransportError:
        return False


def _until(true: Callable[[], bool], supervisor: Supervisor) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        supervisor.look()
        for child in supervisor.children:
            if child.deaths >= MOST_DEATHS:
                raise LocalError(
                    f"The {child.name} ended {child.deaths} times while it started; the end of {child.log} says why."
                )
        if time.monotonic() > deadline:
            raise LocalError(
                f"Not everything was ready after {SECONDS:g} seconds; see the logs beside {child.log}."
            )
        time.sleep(0.05)
