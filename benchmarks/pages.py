"""A page of 20 events of a job that has 100 events, and of one that has 100,000.

Rows evaluated are what DynamoDB reads and bills. The emulator sorts a whole partition for every page, so its time grows
where DynamoDB's does not.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from typing import Any

from emulated import Evaluated
from measuring import Result, stack

FEW, MANY = 100, 100_000


def measure() -> list[Result]:
    """The first page, one in the middle, and the empty one after the newest row."""
    with stack() as (_, told, state):
        os.environ |= json.loads((state / "environment.json").read_text())
        from tuneyard import clock, ids, jobs, table
        from tuneyard.records import Job, JobEvent, JobKind, JobStatus
        from tuneyard.settings import settings

        settings.cache_clear()
        table._client.cache_clear()
        client, evaluated = table._client(), Evaluated()
        client.meta.events.register("after-call.dynamodb.Query", evaluated)

        def job_with(count: int) -> Job:
            job = Job(
                id=ids.new(), team=told["team"], model_id="m", collection="a/b/c", base_model="tuneyard/tiny",
                kind=JobKind.RL, status=JobStatus.SUCCEEDED, config={}, experimental_config={}, input_key="i",
                created_at=clock.now_ms(), created_by="bench", last_event=count,
            )  # fmt: skip
            data = {"loss": 0.1, "entropy": 1.0, "learning_rate": 1e-3}
            for start in range(1, count + 1, 25):
                puts: Any = []
                for n in range(start, min(count, start + 24) + 1):
                    row = JobEvent(
                        id=ids.ordered(job.id, n),
                        job_id=job.id,
                        seq=n,
                        type="gradient_step",
                        data=data,
                        created_at=n,
                    )
                    puts.append({"PutRequest": {"Item": table._item(row)}})
                client.batch_write_item(RequestItems={settings().table_name: puts})
            return job

        few, many = job_with(FEW), job_with(MANY)

        def page(job: Job, after: int, rows: int) -> tuple[float, int]:
            evaluated.rows, began = 0, time.perf_counter()
            found = jobs.events(job, after=ids.ordered(job.id, after) if after else None, limit=21)
            assert len(found) == rows
            return (time.perf_counter() - began) * 1e3, evaluated.rows

        results = []
        for what, share, rows in (("first", 0.0, 21), ("middle", 0.5, 21), ("after the newest", 1.0, 0)):
            taken = {
                job.id: [page(job, round(job.last_event * share), rows) for _ in range(5)]
                for job in (few, many)
            }
            times = {name: statistics.median(one for one, _ in found) for name, found in taken.items()}
            reads = {name: found[0][1] for name, found in taken.items()}
            at = f"{what} page at {MANY:,} events, peer: at {FEW}"
            ratio = (
                "1.00" if reads[many.id] == reads[few.id] else f"{reads[many.id] / max(1, reads[few.id]):.2f}"
            )
            results += [
                Result(f"{at}: rows evaluated", str(reads[many.id]), str(reads[few.id]), ratio, "<= 1.2"),
                Result.of(f"{at}: on the emulator", times[many.id], times[few.id], "ms"),
            ]
    return results
