"""What the tests share: an AWS account made from template.yaml, the door over it, and a live local stack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import psutil
import pytest
from fastapi.testclient import TestClient
from moto import mock_aws
from samtranslator.yaml_helper import yaml_parse

from tuneyard import auth, blobs, bus, queues, table, teams, vault, web, workers
from tuneyard.records import Identity, Role
from tuneyard.settings import settings
from tuneyard_host.local import doors

ROOT = Path(__file__).parent.parent
NOT_STORAGE = ("AWS::Serverless", "AWS::Lambda", "AWS::CloudWatch", "AWS::SQS::QueuePolicy")
TINY = {"id": "tuneyard/tiny", "source": "builtin:tiny", "learning_rate": 0.003}


def pytest_xdist_auto_num_workers() -> int:
    """How many processes run the tests: one for each core and each 4 GB, of which a stack takes half."""
    return max(1, min(4, os.cpu_count() or 1, psutil.virtual_memory().total // 4_000_000_000))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that import ART last: it patches transformers for the whole process."""
    items.sort(key=lambda item: item.get_closest_marker("judges") is not None)


@pytest.fixture(scope="session")
def template() -> dict[str, Any]:
    """template.yaml, parsed."""
    parsed: dict[str, Any] = yaml_parse((ROOT / "template.yaml").read_text())
    return parsed


@pytest.fixture(scope="session")
def storage_template(template: dict[str, Any]) -> str:
    """The part of the template that is not Lambda and not API: what records and messages live in."""
    kept = {
        name: resource
        for name, resource in template["Resources"].items()
        if not resource["Type"].startswith(NOT_STORAGE) and "Condition" not in resource
    }
    outputs = {
        name: output for name, output in template["Outputs"].items() if "Api" not in json.dumps(output)
    }
    return json.dumps({"Resources": kept, "Outputs": outputs})


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch, storage_template: str) -> Iterator[dict[str, str]]:
    """A fresh AWS account with the template's table, bucket, queues, bus and rule; the environment points at it."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "TUNEYARD_"))]:
        monkeypatch.delenv(name)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        cloudformation = boto3.client("cloudformation")
        cloudformation.create_stack(StackName="test", TemplateBody=storage_template)
        stack = cloudformation.describe_stacks(StackName="test")["Stacks"][0]
        outputs = {output["OutputKey"]: output["OutputValue"] for output in stack["Outputs"]}
        for name, key in (
            ("TABLE_NAME", "TableName"),
            ("BUCKET_NAME", "BucketName"),
            ("TRAINING_QUEUE_URL", "TrainingQueueUrl"),
            ("EVENT_QUEUE_URL", "EventQueueUrl"),
            ("DELIVERY_QUEUE_URL", "DeliveryQueueUrl"),
            ("BUS_NAME", "BusName"),
        ):
            monkeypatch.setenv(f"TUNEYARD_{name}", outputs[key])
        monkeypatch.setenv("TUNEYARD_BASE_MODELS", json.dumps([TINY]))
        monkeypatch.setenv("TUNEYARD_EVENTS_HOLD_SECONDS", "0")
        forget()
        yield outputs
    forget()


def forget() -> None:
    """Make every cached client and setting anew at its next use."""
    settings.cache_clear()
    auth.forget()
    vault.forget()
    workers._written.clear()
    for edge in (table, blobs, queues, bus, vault):
        edge._client.cache_clear()


@pytest.fixture
def key(aws: dict[str, str]) -> str:
    """An administrator's key of team ``acme``."""
    teams.create_team("acme")
    return teams.create_key(team="acme", user="ada", role=Role.ADMIN)[1]


@pytest.fixture
def caller(key: str) -> Identity:
    """The identity of that key."""
    found = teams.find_key(key)
    assert found is not None
    return Identity(found.team, found.user, found.role, found.id)


@pytest.fixture
def stranger(key: str) -> dict[str, str]:
    """The headers of another team's key."""
    teams.create_team("rivals")
    return {"Authorization": f"Bearer {teams.create_key(team='rivals', user='eve', role=Role.ADMIN)[1]}"}


@pytest.fixture
def api(key: str) -> Iterator[TestClient]:
    """Every route of every function behind one door, called with the key of team ``acme``."""
    routers = [module.router for module in doors.modules().values() if hasattr(module, "router")]
    app = web.create_app("Tuneyard", *routers)
    with TestClient(app, headers={"Authorization": f"Bearer {key}"}, raise_server_exceptions=False) as client:
        yield client


@dataclass(frozen=True)
class Stack:
    """A running `tuneyard up`."""

    base_url: str
    inference_url: str
    api_key: str
    team: str
    pid: int
    state: Path


@contextmanager
def running(state: Path, *options: str) -> Iterator[Stack]:
    """The whole service, as a child of the tests, until the block ends; it leaves no process behind."""
    command = [
        sys.executable,
        "-m",
        "tuneyard_host.cli",
        "up",
        "--state",
        str(state),
        "--port",
        "0",
        "--json",
    ]
    command += options
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line, "tuneyard up ended before it was ready"
            yield Stack(**json.loads(line), state=state)
        finally:
            family = [p for p in [psutil.Process(process.pid)] if process.poll() is None]
            family += [child for parent in family for child in parent.children(recursive=True)]
            process.terminate()
            process.wait(30)
    assert left_of(family, seconds=1) == []


def left_of(processes: list[psutil.Process], *, seconds: float) -> list[psutil.Process]:
    """Those that still run after so many seconds; one that nobody has asked for its exit code does not run."""
    left = psutil.wait_procs(processes, timeout=seconds)[1]
    return [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The live local stack that the tests of a session share."""
    with running(tmp_path_factory.mktemp("stack") / "state") as found:
        yield found
