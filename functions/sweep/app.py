"""Once a minute: move on whatever stands still."""

from __future__ import annotations

from typing import Any

from tuneyard import sweeps


def handler(event: dict[str, Any], context: object) -> None:  # noqa: ARG001
    """Sweep."""
    sweeps.sweep()
