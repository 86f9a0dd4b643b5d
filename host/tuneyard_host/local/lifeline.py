"""The start of every child: it gets its settings from its parent, and ends with it.

A child's standard input is a pipe whose other end only its parent holds. First comes a line with the child's settings,
which need not be known when the child is started: until they come it loads what takes long. Then nothing comes, until
the parent is gone: however it ends, by kill -9 too, the kernel closes the pipe, and the child ends itself and all
that it started. Nothing has to be running for that, and it works on every system that has pipes.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

SECONDS_TO_END = 10
CHILD = "tuneyard_host.child"
"""The module that runs a ``tuneyard`` command in this way."""

_parent_gone = threading.Event()


def settings_line(settings: dict[str, str]) -> bytes:
    """What the parent writes first."""
    return json.dumps(settings).encode() + b"\n"


def run(command: Callable[[list[str]], None], arguments: list[str]) -> None:
    """Run a command, after ``--preload MODULE,...``, as a child that does not outlive its parent."""
    pipe = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if arguments[0] == "--preload":
        for module in arguments[1].split(","):
            importlib.import_module(module)
        arguments = arguments[2:]
    os.environ |= json.loads(pipe.readline() or sys.exit(1))
    threading.Thread(target=_wait_for_the_end, args=(pipe,), daemon=True, name="lifeline").start()
    try:
        command(arguments)
    finally:
        if _parent_gone.is_set():
            _end_group()


def _wait_for_the_end(pipe: BinaryIO) -> None:
    pipe.read()
    _parent_gone.set()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_END)
    _end_group()


def _end_group() -> None:
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
