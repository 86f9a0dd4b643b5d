"""Listening sockets on the loopback interface, opened before the process that serves them.

The supervisor holds them, so a port cannot be lost to another program while a child is started again, and what
clients send in that second waits instead of being refused.
"""

from __future__ import annotations

import errno
import socket
import time

from tuneyard_host.local.folder import LocalError

HOST = "127.0.0.1"


def listen(port: int) -> socket.socket:
    """A socket that listens on this port, 0 for any free one; LocalError when another program has it."""
    try:
        return _open(port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            told = f"Port {port} of {HOST} is taken by another program. Stop it, or choose another port"
        else:
            told = f"Port {port} of {HOST} cannot be opened ({error.strerror}). Choose another port"
        raise LocalError(f"{told} with --port N (0 takes a free one).") from error


def listen_again(port: int | None, *, patience: float = 3.0) -> socket.socket:
    """A socket on the port of the last time, waiting a little for its old owner to end; else on any free port."""
    deadline = time.monotonic() + patience
    while port:
        try:
            return _open(port)
        except OSError:
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
    return _open(0)


def number(listener: socket.socket) -> int:
    """The port that a socket listens on."""
    return int(listener.getsockname()[1])


def address(listener: socket.socket) -> str:
    """The address of what serves this socket."""
    return f"http://{HOST}:{number(listener)}"


def _open(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener
