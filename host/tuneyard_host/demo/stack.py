"""A local stack for the demo alone, when none is named; it ends with the demo, however that ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tuneyard_host.local import lifeline
from tuneyard_host.local.folder import LocalError


@contextmanager
def running(state: Path) -> Iterator[dict[str, Any]]:
    """What ``tuneyard up --json`` says of a stack on this folder, until the block ends."""
    command = [sys.executable, "-m", lifeline.CHILD, "up", "--state", str(state), "--port", "0", "--json"]
    child = subprocess.Popen(  # noqa: S603 - our own interpreter and command
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert child.stdin is not None and child.stdout is not None  # noqa: S101 - for the type checker
    try:
        child.stdin.write(lifeline.settings_line({}))
        child.stdin.flush()
        line = child.stdout.readline()
        if not line:
            raise LocalError(f"The local stack did not start; {state / 'logs'} may say more.")
        yield json.loads(line)
    finally:
        child.terminate()
        child.wait()
        child.stdin.close()
        child.stdout.close()
