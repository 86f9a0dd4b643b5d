"""What must happen once a minute whatever was lost: jobs, events and deletions that stand still are moved on."""

from __future__ import annotations

from tuneyard import leases, models, table, workers
from tuneyard.jobs import publish
from tuneyard.records import ArtifactEvent, Model


def sweep() -> leases.Swept:
    """Move on everything that is due, and tell of the jobs."""
    swept = leases.sweep()
    publish(*table.listed(ArtifactEvent, "due", "", limit=1000))
    for model in table.listed(Model, "due", "", limit=100):
        models.finish_deletion(model, by=model.created_by)
    workers.seen("sweep", "sweep")
    return swept
