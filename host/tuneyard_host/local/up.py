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

import httpx

from tuneyard_host.local import emulator, environment, ports
from tuneyard_host.local.folder import Folder, LocalError, write_private
from tuneyard_host.local.processes import Child, Say, Supervisor

TINY = {"id": "tuneyard/tiny", "source": "builtin:tiny", "learning_rate": 3e-3}
LEASE_SECONDS, DOOR_BODY_BYTES = 10, 256_000_000
SECONDS_TO_START = 180
USER, WORKER = "local", "local-0"


@dataclass(frozen=True)
class Options:
    """What the person at the keyboard chose."""

    state: Path
    port: int
    team: str
    base_models: list[dict[str, Any]]


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

    The emulator comes first, then the template on it; the workers, which take seconds to load, start as soon as they
    can know their table, and the key is made while they load. LocalError says why it cannot run.
    """
    with ExitStack() as cleanup:
        door = cleanup.enter_context(ports.listen(options.port))
        folder = cleanup.enter_context(Folder(options.state))
        cleanup.enter_context(_until_told_to_stop())
        supervisor = Supervisor(say)
        cleanup.callback(supervisor.stop)
        began = time.time()
        endpoint = _start_emulator(folder, supervisor, cleanup)
        own = _deploy(folder, endpoint, options)
        _start_workers(folder, supervisor, own, door, cleanup)
        key = _first_key(folder, endpoint, own, options.team)
        base_url = f"http://{ports.HOST}:{ports.number(door)}"
        _until_ready(base_url, supervisor, began)
        announce(Running(base_url, f"{base_url}/v1", key, options.team, os.getpid()))
        while True:
            supervisor.look()
            time.sleep(0.1)


def _start_emulator(folder: Folder, supervisor: Supervisor, cleanup: ExitStack) -> str:
    listener = cleanup.enter_context(ports.listen_again(folder.remember().get("emulator_port")))
    port = ports.number(listener)
    folder.remember(emulator_port=port)
    command = ["internal", "emulator", "--fd", str(listener.fileno()), "--folder", str(folder.aws)]
    surroundings = environment.clean() | emulator.environment(folder, port=port) | environment.account()
    supervisor.add(Child("emulator", command, surroundings, folder.logs / "emulator.log", [listener.fileno()]))
    endpoint = f"http://{ports.HOST}:{port}"
    _until(lambda: _answers(f"{endpoint}/_ministack/health"), supervisor, "emulator")
    return endpoint


def _deploy(folder: Folder, endpoint: str, options: Options) -> dict[str, str]:
    """Deploy the template; the settings of our own processes, which are those of its functions."""
    environment.enter(environment.aws(endpoint))
    from tuneyard_host.local.deploy import deploy

    known = folder.remember()
    port = known.get("inference_port") or _free_port()
    token = known.get("engine_token") or secrets.token_urlsafe(32)
    folder.remember(inference_port=port, engine_token=token)
    parameters = {
        "BaseModels": json.dumps([TINY, *options.base_models]), "InferenceEngineUrl": f"http://{ports.HOST}:{port}",
        "EngineToken": token, "LeaseSeconds": str(LEASE_SECONDS), "ScaleToZero": "false",
    }  # fmt: skip
    return environment.settings(deploy(endpoint=endpoint, parameters=parameters), parameters)
