"""A `tuneyard` command as a child of another: ``python -m tuneyard_host.child [--preload MODULES] COMMAND``."""

from __future__ import annotations

import sys

from tuneyard_host.cli import app
from tuneyard_host.local import lifeline

if __name__ == "__main__":
    lifeline.run(lambda arguments: app(arguments, prog_name="tuneyard"), sys.argv[1:])
