"""The events of docs/webhooks.md: each kind with the body that it is sent with when an automation has no payload."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from tuneyard import artifacts, bus, jobs, payloads, runs, webhooks
from tuneyard.records import (
    ArtifactEvent,
    Collection,
    EventType,
    Identity,
    Job,
    JobKind,
    JobStatus,
    Role,
    Run,
    RunRow,
    Version,
)
from tuneyard.webhook_records import Webhook

_START, _END = "<!-- events -->", "<!-- /events -->"
PATTERN = re.compile(f"{_START}.*?{_END}", re.DOTALL)
_WHEN, _MODEL = 1_767_225_600_000, "6d2c2f6e-1f5b-4f0e-9a3b-7c1d8e9f0a12"
_EVENT = "1f0c1b5e-6d0a-4a57-9d0e-0c3f6f1f2a11"


class Example(NamedTuple):
    """An event as the code makes it, when it happens, and what a metric came to."""

    event: ArtifactEvent
    when: str
    values: dict[str, str]


def markdown() -> str:
    """The catalogue, between two marks."""
    parts = [_START]
    for example in _examples():
        event = example.event.model_copy(update={"id": _EVENT, "created_at": _WHEN})
        body = json.loads(payloads.render(None, event, example.values, {}))
        parts += [
            f"### `{event.type.value}`",
            example.when,
            "```json\n" + json.dumps(body, indent=2, ensure_ascii=False) + "\n```",
        ]
    parts += [
        "### `webhook.disabled`",
        "A webhook was disabled because of how its endpoint does. No automation can listen to it: it is on the event "
        "bus, with this detail, for rules of the operator's own.",
        "```json\n" + json.dumps(json.loads(bus.detail(_disabled())), indent=2) + "\n```",
    ]
    return "\n\n".join([*parts, _END])


def _disabled() -> ArtifactEvent:
    hook = Webhook(
        id="9e8d7c6b-5a4f-4e3d-8c2b-1a0f9e8d7c16",
        team="acme",
        name="deploy",
        url="https://api.github.com/repos/acme/deploy/dispatches",
        created_at=0,
        created_by="ada",
        updated_at=0,
        enabled_at=0,
    )
    told = webhooks.disabled(hook, "The endpoint answered 410: it is gone for good.", now=_WHEN)
    return told.model_copy(update={"id": _EVENT})


def _examples() -> list[Example]:
    ada = Identity("acme", "ada", Role.ADMIN, "")
    agent = Collection(name="acme/support/agent", id=_MODEL)
    best = Collection(name="acme/wandb-registry-models/best", id="r", kind="registry")
    metadata = {"step": 3, "kind": "rl", "reward": 0.82}
    made = Version(
        id="v", collection_id="m", version=3, metadata=metadata, prefix="", created_at=0, created_by="ada"
    )
    linked = made.model_copy(update={"version": 0})
    run = Run(
        id="0b4f7a52-2f0e-4c43-8b3a-5d9f5f7c1a10",
        entity="acme",
        project="support",
        name="agent",
        model_id=_MODEL,
        user="ada",
        created_at=0,
    )
    row = RunRow(run_id=run.id, row=7, metrics={"val/reward": 0.91}, created_at=0)
    metric = {"metric_name": "val/reward", "metric_value": "0.91", "metric_threshold": "> 0.9"}
    job = Job(
        id="c7b6a5d4-3e2f-4a1b-8c0d-9e8f7a6b5c14",
        team="acme",
        model_id=_MODEL,
        run_id=run.id,
        run_user="ada",
        collection="acme/support/agent",
        base_model="",
        kind=JobKind.RL,
        status=JobStatus.FAILED,
        config={},
        experimental_config={},
        input_key="",
        created_at=0,
        created_by="ada",
    )
    failed = jobs.run_state(
        job, "failed", "The loss is not a number at gradient step 12. Lower the learning rate."
    )
    alias = artifacts.happened(ada, EventType.ADD_ARTIFACT_ALIAS, agent, made, alias="production")
    return [
        Example(
            alias,
            "An alias is added to a version, or moved to it. A new checkpoint gets `step{N}` and `latest`, a new "
            "version of a data set `latest`; giving a version an alias that it has already is no event.",
            {},
        ),
        Example(
            artifacts.happened(ada, EventType.ADD_ARTIFACT_TAG, agent, made, tag="reviewed"),
            "A tag is added to a version that did not have it.",
            {},
        ),
        Example(
            artifacts.happened(ada, EventType.LINK_ARTIFACT, best, linked, also_in="acme/support"),
            "A version is linked into a collection of a registry. Automations of the registry hear of it, and those of "
            "the project that the version comes from.",
            {},
        ),
        Example(
            runs.event(run, row, author="ada"),
            "A metric of a run is past the threshold of the automation; at most once in 24 hours for each automation "
            "and run. Projects only.",
            metric,
        ),
        Example(
            failed,
            "A training job is `running`, `finished`, `failed` or `cancelled`. Projects only.",
            {},
        ),
    ]
