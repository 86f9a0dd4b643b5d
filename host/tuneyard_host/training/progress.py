"""How far a job has come, kept in the bucket, so that a resumed job repeats a second or two, at most a minute."""

from __future__ import annotations

import json
import time
from typing import NamedTuple

from tuneyard import blobs
from tuneyard.errors import NotFound
from tuneyard.records import Job
from tuneyard_host.training.adapters import Learner
from tuneyard_host.training.plans import Plan

_SOONEST, _LATEST, _SHARE = 1.0, 60.0, 20
"""Seconds between two marks: twenty times what one costs, so that marks cost a job at most a twentieth."""


class Mark(NamedTuple):
    """The state after ``step`` gradient steps, the sums of their metrics, and the ledger's ratios so far."""

    step: int
    total: dict[str, float]
    ratios: dict[str, float]

    def restore(self, plan: Plan) -> None:
        """Put the ratios of the steps that are done into a plan made anew."""
        for place, ratio in self.ratios.items():
            plan.ledger[int(place)]["ratio"] = ratio


def _ratios(plan: Plan) -> dict[str, float]:
    """The ratios that a plan's ledger has so far, by their place in it, as JSON can hold them."""
    return {str(at): row["ratio"] for at, row in enumerate(plan.ledger) if row.get("ratio") is not None}


class Progress:
    """The marks of one job."""

    def __init__(self, job: Job) -> None:
        self._prefix = blobs.progress_prefix(job.id)
        self._marked, self._cost = time.monotonic(), 0.0

    def load(self, learner: Learner, *, told: int) -> Mark | None:
        """Put the learner into the state of the newest mark; None, and the learner untouched, when there is none.

        A mark beyond the ``told`` gradient steps is passed over: their events would be missing. Table and bucket may
        come back from a crash of the whole machine at different ages.
        """
        try:
            manifest = json.loads(blobs.get(f"{self._prefix}manifest.json"))
            if manifest["step"] > told:
                return None
            files = {name: blobs.get(self._at(manifest["step"]) + name) for name in manifest["files"]}
        except NotFound:
            return None
        learner.load(files, with_optimizer=True)
        return Mark(manifest["step"], manifest["total"], manifest.get("ratios", {}))

    def mark(self, learner: Learner, plan: Plan, step: int, total: dict[str, float]) -> None:
        """Keep the learner's state, when the last mark is long enough ago; the manifest, which names the rest, last."""
        began = time.monotonic()
        if began - self._marked < min(_LATEST, max(_SOONEST, _SHARE * self._cost)):
            return
        mark, files = Mark(step, total, _ratios(plan)), learner.files()
        for name, body in files.items():
            blobs.put(self._at(mark.step) + name, body)
        manifest = {**mark._asdict(), "files": sorted(files)}
        blobs.put(f"{self._prefix}manifest.json", json.dumps(manifest).encode())
        self._marked = time.monotonic()
        self._cost = self._marked - began

    def forget(self) -> None:
        """Remove what was kept: the job is over."""
        blobs.delete_prefix(self._prefix)

    def _at(self, step: int) -> str:
        return f"{self._prefix}{step:08d}/"
