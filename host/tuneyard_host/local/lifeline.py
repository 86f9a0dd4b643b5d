"""The start of every child: it ends itself, and all that it started, when the process that started it is gone.

A child's standard input is a pipe whose other end only its parent holds. However the parent ends, by kill -9 too, the
kernel closes that end, and the child reads the end of the file: nothing has to be running for that, and it works
on every system that has pipes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

SECONDS_TO_END = 10
_parent_gone = threading.Event()


def hold() -> None:
    """End this process and its process group soon after its parent is gone."""
    threading.Thread(target=_wait_for_the_end, args=(os.dup(0),), daemon=True, name="lifeline").start()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def _wait_for_the_end(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    _parent_gone.set()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_END)
    _end_group()


def _end_group() -> None:
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main() -> None:
    """Run a ``tuneyard`` command as a child that does not outlive its parent."""
    hold()
    from tuneyard_host.cli import app

    try:
        app(sys.argv[1:], prog_name="tuneyard")
    finally:
        if _parent_gone.is_set():
            _end_group()


if __name__ == "__main__":
    main()
