"""``tuneyard up``: the whole service on this machine, until Ctrl-C."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from tuneyard_host.local import emulator, environment, ports, readiness
from tuneyard_host.local.folder import Folder, write_private
from tuneyard_host.local.processes import Child, Say, Supervisor

TINY = {"id": "tuneyard/tiny", "source": "builtin:tiny", "learning_rate": 3e-3}
LEASE_SECONDS, DOOR_BODY_BYTES = 10, 256_000_000
WORKER = "local-0"


@dataclass(frozen=True)
class Options:
    """What the person at the keyboard chose."""

    state: Path
    port: int
    team: str = "local"
    user: str = "local"
    base_models: tuple[dict[str, Any], ...] = ()


class Running(NamedTuple):
    """Where the running service is, and the key to it."""

    base_url: str
    inference_url: str
    api_key: str
    team: str
    pid: int


class Stopped(Exception):
    """SIGTERM or Ctrl-C."""


def up(options: Options, *, announce: Callable[[Running], None], say: Say) -> None:
    """Run everything until SIGTERM or Ctrl-C; ``announce`` is called once, when all of it is ready to serve.

    All processes start at once, because torch takes seconds to load; the workers and the door get their settings when
    the template is deployed on the emulator, and the key is made meanwhile. LocalError says why it cannot run.
    """
    with ExitStack() as cleanup:
        cleanup.enter_context(_until_told_to_stop())
        folder = cleanup.enter_context(Folder(options.state))
        door = cleanup.enter_context(ports.listen(options.port))
        say(f"Starting Tuneyard; its state and logs are in {folder.path}.")
        supervisor = Supervisor(say)
        cleanup.callback(supervisor.stop)
        began = time.time()
        stack = _Stack(folder, supervisor, cleanup, door)
        stack.start()
        stack.deploy(options)
        key = stack.first_key(options)
        base_url = ports.address(door)
        readiness.wait(base_url, supervisor, worker=WORKER, since=began)
        announce(Running(base_url, f"{base_url}/v1", key, options.team, os.getpid()))
        full = False
        while True:
            supervisor.look()
            if (now_full := emulator.is_full(folder.path)) and not full:
                say(
                    f"The disk that holds {folder.path} is full: nothing can be stored until there is room on it."
                )
            full = now_full
            time.sleep(0.1)


class _Stack:
    """The parts, started one after the other: each knows what the one before has found out."""

    def __init__(
        self, folder: Folder, supervisor: Supervisor, cleanup: ExitStack, door: socket.socket
    ) -> None:
        self.folder, self.supervisor, self.door = folder, supervisor, door
        self.remembered = folder.remember()
        self.emulator = cleanup.enter_context(ports.listen_again(self.remembered.get("emulator_port")))
        self.inference = cleanup.enter_context(ports.listen_again(self.remembered.get("inference_port")))
        self.token = self.remembered.get("engine_token") or secrets.token_urlsafe(32)
        folder.remember(
            emulator_port=ports.number(self.emulator), inference_port=ports.number(self.inference),
            engine_token=self.token,
        )  # fmt: skip
        self.endpoint = ports.address(self.emulator)
        self.settings: dict[str, str] = {}

    def start(self) -> None:
        """Start everything; the emulator has what it needs, with the state of its last snapshot."""
        own = environment.aws(self.endpoint) | emulator.environment(
            self.folder, port=ports.number(self.emulator)
        )
        self._add("emulator", "--folder", self.folder.aws, listener=self.emulator, settings=own)
        lock = self.folder.path / "trainer.lock"
        threads = max(1, (os.cpu_count() or 2) - 1)  # one core is for all the others
        self._add("trainer", "--name", WORKER, "--lock", lock, preload="torch,transformers", threads=threads)
        self._add("inference", listener=self.inference, preload="torch,transformers")
        self._add("sender")
        self._add("door", "--access-log", self.folder.logs / "access.log", listener=self.door)

    def deploy(self, options: Options) -> None:
        """Deploy the template; the settings of its functions are those of our own processes too."""
        environment.enter(environment.aws(self.endpoint))
        from tuneyard_host.local.deploy import deploy

        readiness.wait_for_answer(f"{self.endpoint}/_ministack/health", self.supervisor)
        taken = [ports.number(listener) for listener in (self.door, self.emulator, self.inference)]
        parameters = {
            "BaseModels": json.dumps([TINY, *options.base_models]), "EngineToken": self.token,
            "InferenceEngineUrl": ports.address(self.inference), "LeaseSeconds": str(LEASE_SECONDS),
            "ScaleToZero": "false", "AllowLocalTargets": "true", "ChatStreaming": "false",
            "OwnHosts": json.dumps([f"{name}:{port}" for port in taken for name in (ports.HOST, "localhost")]),
        }  # fmt: skip
        outputs = deploy(endpoint=self.endpoint, parameters=parameters)
        self.settings = environment.settings(outputs, parameters) | environment.aws(self.endpoint)
        write_private(self.folder.environment, json.dumps(self.settings))
        for child in self.supervisor.children[1:]:
            own = {"TUNEYARD_MAX_BODY_BYTES": str(DOOR_BODY_BYTES)} if child.name == "door" else {}
            child.go(self.settings | own)

    def first_key(self, options: Options) -> str:
        """The administrator's key, and a snapshot that holds it before anybody is told of it."""
        environment.enter(self.settings)
        from tuneyard_host.local.keys import first_key

        key = first_key(self.folder, team=options.team, user=options.user)
        readiness.save(self.endpoint)
        return key

    def _add(
        self, name: str, *arguments: object, listener: socket.socket | None = None, preload: str = "",
        settings: dict[str, str] | None = None, threads: int | None = None,
    ) -> None:  # fmt: skip
        fd = None if listener is None else listener.fileno()
        command = [name, *map(str, arguments)]
        self.supervisor.add(
            Child(name, command, self.folder.logs / f"{name}.log", settings, preload, fd, threads)
        )


@contextmanager
def _until_told_to_stop() -> Iterator[None]:
    """Let SIGTERM, SIGHUP and Ctrl-C end the block quietly; while it ends, only Ctrl-C cuts it short."""

    def stop(_: int, __: FrameType | None) -> None:
        for other in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(other, signal.SIG_IGN)
        raise Stopped

    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    except Stopped:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
