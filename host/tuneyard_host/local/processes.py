"""Children that are started again when they die, and that end when they are told to."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tuneyard_host.local import environment, lifeline

Say = Callable[[str], None]
PAUSES = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
SECONDS_OF_HEALTH = 30.0
SECONDS_TO_STOP = 8.0


@dataclass
class Child:
    """A ``tuneyard`` command in a process group of its own, with its log; lifeline.py starts and ends it."""

    name: str
    arguments: Sequence[str]
    log: Path
    settings: dict[str, str] | None = None
    """Environment variables of its own; while they are None it loads ``preload`` and waits."""
    preload: str = ""
    socket: int | None = None
    threads: int | None = None
    """How many threads it computes with; None leaves that to its libraries."""
    deaths: int = 0
    """Ends that followed each other quickly."""
    started: float = 0.0
    again_at: float = 0.0
    popen: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        """Start it."""
        preload = ["--preload", self.preload] if self.preload else []
        sockets = [] if self.socket is None else [self.socket]
        fd = [f"--fd={socket}" for socket in sockets]
        command = [sys.executable, "-m", lifeline.CHILD, *preload, *self.arguments, *fd]
        threads = {} if self.threads is None else {"OMP_NUM_THREADS": str(self.threads)}
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(  # noqa: S603 - our own interpreter and command
                command, env=threads | environment.clean(), stdin=subprocess.PIPE, stdout=log, stderr=log,
                pass_fds=sockets, start_new_session=True,
            )  # fmt: skip
        self.started = time.monotonic()
        if self.settings is not None:
            self.go(self.settings)

    def go(self, settings: dict[str, str]) -> None:
        """Hand it its settings."""
        self.settings = settings
        assert self.popen is not None and self.popen.stdin is not None  # noqa: S101 - for the type checker
        with contextlib.suppress(BrokenPipeError):  # it is dead already, which look() will find
            self.popen.stdin.write(lifeline.settings_line(settings))
            self.popen.stdin.flush()

    @property
    def alive(self) -> bool:
        """Whether it runs now."""
        return self.popen is not None and self.popen.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child alone; its own children are its own affair until it is gone."""
        if self.popen is not None and self.popen.poll() is None:
            self.popen.send_signal(number)

    def sweep_up(self) -> None:
        """Kill what is left of its process group, and close its lifeline."""
        if self.popen is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        if self.popen.stdin is not None:
            self.popen.stdin.close()


class Supervisor:
    """Keeps children running, in the order in which they were added; stops them in the reverse order."""

    def __init__(self, say: Say) -> None:
        self.children: list[Child] = []
        self._say = say

    def add(self, child: Child) -> Child:
        """Start a child and keep it running."""
        self.children.append(child)
        child.start()
        return child

    def look(self) -> None:
        """Start again what has died, after a pause that grows when it keeps dying, and say so."""
        for child in self.children:
            if child.alive:
                continue
            now = time.monotonic()
            if child.popen is not None:
                self._bury(child, now)
            if child.popen is None and now >= child.again_at:
                child.start()

    def stop(self) -> None:
        """End every child: workers and the door first, together, then the one that they all stand on."""
        for group in (self.children[1:], self.children[:1]):
            for child in group:
                child.signal(signal.SIGTERM)
            deadline = time.monotonic() + SECONDS_TO_STOP
            while any(child.alive for child in group) and time.monotonic() < deadline:
                time.sleep(0.05)
            for child in group:
                if child.alive:
                    self._say(f"The {child.name} did not end in {SECONDS_TO_STOP:g} seconds and was killed.")
                child.sweep_up()

    def _bury(self, child: Child, now: float) -> None:
        assert child.popen is not None  # noqa: S101 - for the type checker
        child.sweep_up()
        somebody_killed_it = child.popen.returncode in (-signal.SIGKILL, -signal.SIGTERM)
        healthy = somebody_killed_it or now - child.started > SECONDS_OF_HEALTH
        child.deaths = 1 if healthy else child.deaths + 1
        pause = PAUSES[min(child.deaths, len(PAUSES)) - 1]
        how, when = _how(child.popen.returncode), f"in {pause:g} s" if pause else "now"
        self._say(f"The {child.name} ended ({how}); starting it again {when}. Its log: {child.log}")
        child.popen, child.again_at = None, now + pause


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
