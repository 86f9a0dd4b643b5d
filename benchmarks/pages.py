"""A page of 20 events of a job that has 100 events, and of one that has 100,000."""

from __future__ import annotations

import json
import os

from measuring import Result, interleaved_ms, stack


def measure() -> list[Result]:
    """Median milliseconds of the first page, of a page in the middle, and of the newest row's empty page."""
    with stack() as (client, told, state):
        os.environ |= json.loads((state / "environment.json").read_text())
        from tuneyard import clock, ids, table
        from tuneyard.records import Job, JobEvent, JobKind, JobStatus

        def job_with(count: int) -> Job:
            job = Job(
                id=ids.new(), team=told["team"], model_id="m", collection="a/b/c", base_model="tuneyard/tiny",
                kind=JobKind.RL, status=JobStatus.SUCCEEDED, config={}, experimental_config={}, input_key="i",
                created_at=clock.now_ms(), created_by="bench", last_event=count,
            )  # fmt: skip
            table.write(table.Put(job))
            data = {"loss": 0.1, "entropy": 1.0, "learning_rate": 1e-3}
            events = [
                JobEvent(
                    id=ids.ordered(job.id, n),
                    job_id=job.id,
                    seq=n,
                    type="gradient_step",
                    data=data,
                    created_at=n,
                )
                for n in range(1, count + 1)
            ]
            for start in range(0, count, 100):
                table.transact(*(table.Put(event) for event in events[start : start + 100]))
            return job

        few, many = job_with(100), job_with(100_000)

        def page(job: Job, after: int) -> None:
            query = {"limit": 20, "wait": 0} | ({"after": ids.ordered(job.id, after)} if after else {})
            client.get(f"/v1/preview/training-jobs/{job.id}/events", params=query).raise_for_status()

        rows = []
        for what, place in (
            ("first", (0, 0)),
            ("middle", (50, 50_000)),
            ("after the newest", (100, 100_000)),
        ):
            found = interleaved_ms(
                {"few": lambda p=place: page(few, p[0]), "many": lambda p=place: page(many, p[1])}, times=40
            )
            rows.append(
                Result.of(
                    f"{what} page at 100,000 events, peer: at 100",
                    found["many"],
                    found["few"],
                    "ms",
                    "<= 1.2",
                )
            )
    return rows
