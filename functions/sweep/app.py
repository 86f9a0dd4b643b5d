"""Once a minute: move on whatever stands still, and tell what alarms and the scaling of trainers go by."""

from __future__ import annotations

from typing import Any

from aws_lambda_powertools.metrics import MetricUnit, single_metric

from tuneyard import sweeps
from tuneyard.settings import settings


def handler(event: dict[str, Any], context: object) -> None:  # noqa: ARG001
    """Sweep."""
    for name, value in sweeps.sweep()._asdict().items():
        with single_metric(name, MetricUnit.Count, value, namespace=settings().secret_prefix):
            pass
