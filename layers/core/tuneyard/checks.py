"""The system check: is every part there, answered within five seconds whatever hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import httpx

from tuneyard import blobs, queues, table, workers
from tuneyard.settings import settings

_SECONDS = 4.5


def system_check() -> tuple[bool, dict[str, Any]]:
    """Whether all is well, and what each part answered."""
    checks: dict[str, Callable[[], None]] = {
        "database": table.reachable,
        "storage": blobs.reachable,
        "cpu_queue": _cpu_queue,
        "gpu_queue": _gpu_queue,
        "inference": _inference,
    }
    pool = ThreadPoolExecutor(len(checks))
    started = time.monotonic()
    tasks = {name: pool.submit(_timed, check) for name, check in checks.items()}
    wait(tasks.values(), timeout=_SECONDS)
    pool.shutdown(wait=False, cancel_futures=True)
    late = {
        "success": False,
        "duration": time.monotonic() - started,
        "errors": [f"no answer within {_SECONDS} s"],
    }
    found = {name: task.result() if task.done() else late for name, task in tasks.items()}
    healthy = all(answer["success"] for answer in found.values())
    short = {name: found.pop(name)["success"] for name in ("database", "storage")}
    return healthy, {"api": True, **short, **found}


def _timed(check: Callable[[], None]) -> dict[str, Any]:
    started = time.monotonic()
    errors: list[str] = []
    try:
        check()
    except Exception as error:
        errors.append(str(error) if isinstance(error, _Unwell) else type(error).__name__)
    return {"success": not errors, "duration": time.monotonic() - started, "errors": errors}


class _Unwell(Exception):
    """A part that answers, but not as it should."""


def _cpu_queue() -> None:
    queues.waiting(settings().event_queue_url)
    queues.waiting(settings().delivery_queue_url)
    for kind in ("sweep", "sender"):
        if not workers.alive(kind):
            raise _Unwell(f"no {kind} was seen in the last two minutes")


def _gpu_queue() -> None:
    waiting = queues.waiting(settings().training_queue_url)
    if not workers.alive("trainer") and (waiting or not settings().scale_to_zero):
        raise _Unwell(f"no trainer was seen in the last two minutes; {waiting} jobs wait")


def _inference() -> None:
    if not settings().inference_engine_url:
        raise _Unwell("no inference service is configured")
    httpx.get(f"{settings().inference_engine_url}/health", timeout=_SECONDS).raise_for_status()
