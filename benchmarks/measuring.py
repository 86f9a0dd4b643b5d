"""What the benchmarks share: timing, and the running stack."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx


@dataclass(frozen=True)
class Result:
    """One row of the results."""

    what: str
    ours: str
    peer: str = ""
    ratio: str = ""
    goal: str = ""

    @classmethod
    def of(cls, what: str, ours: float, peer: float, unit: str, goal: str = "") -> Result:
        """A measurement against its peer's."""
        return cls(what, f"{ours:.3g} {unit}", f"{peer:.3g} {unit}", f"{ours / peer:.2f}", goal)


def median_ms(action: Callable[[], Any], *, times: int, warm: int = 3) -> float:
    """The median time of one call, in milliseconds."""
    for _ in range(warm):
        action()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        action()
        found.append((time.perf_counter() - began) * 1000)
    return statistics.median(found)


def interleaved_ms(actions: dict[str, Callable[[], Any]], *, times: int, warm: int = 3) -> dict[str, float]:
    """The median time of each action, taken in turns, so that what else the machine does falls on all alike."""
    found: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(times + warm):
        for name, action in actions.items():
            began = time.perf_counter()
            action()
            if number >= warm:
                found[name].append((time.perf_counter() - began) * 1000)
    return {name: statistics.median(values) for name, values in found.items()}


@contextmanager
def stack(*options: str) -> Iterator[tuple[httpx.Client, dict[str, Any], Path]]:
    """A local stack of its own, with these options: a client with its key, what it announced, and its state folder."""
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        command = [
            sys.executable,
            "-m",
            "tuneyard_host.cli",
            "up",
            "--state",
            str(state),
            "--port",
            "0",
            "--json",
            *options,
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                told = json.loads(process.stdout.readline())
                headers = {"Authorization": f"Bearer {told['api_key']}"}
                with httpx.Client(base_url=told["base_url"], headers=headers, timeout=120) as client:
                    yield client, told, state
            finally:
                process.terminate()
                process.wait(30)
