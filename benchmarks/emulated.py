"""The local stack's AWS without the stack, and the customers' endpoints, each as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent
Times = dict[str, float]
"""When each delivery first came in, by path and id."""


async def receive(port: int) -> None:
    """The customers' endpoints: /ok answers at once, /dead never, GET /times tells when each id came in."""
    times: Times = {}

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                lines = head.split("\r\n")
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
                await reader.readexactly(int(headers.get("content-length", 0)))
                path = lines[0].split(" ")[1]
                if "webhook-id" in headers:
                    times.setdefault(f"{path} {headers['webhook-id']}", time.time())
                if path == "/dead":
                    await asyncio.sleep(3600)
                body = json.dumps(times).encode() if path == "/times" else b"ok"
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def process(*command: str, **environment: str) -> Iterator[None]:
    """A child that ends with the block."""
    child = subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        child.kill()
        child.wait()


def wait_for(url: str) -> None:
    """Wait until something answers."""
    for _ in range(300):
        with contextlib.suppress(httpx.TransportError):
            httpx.get(url, timeout=2)
            return
        time.sleep(0.05)
    raise SystemExit(f"{url} does not answer")


@contextlib.contextmanager
def answering() -> Iterator[str]:
    """A receiver of webhooks; its address."""
    port = free_port()
    with process(sys.executable, __file__, "--receive", str(port)):
        wait_for(f"http://127.0.0.1:{port}/ok")
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def surroundings() -> Iterator[str]:
    """The local stack's AWS with the template's table, queues and rule, and a receiver; the receiver's address."""
    from tuneyard_host.local import emulator
    from tuneyard_host.local.folder import Folder

    port, before = free_port(), dict(os.environ)
    endpoint = f"http://127.0.0.1:{port}"
    for name in [name for name in os.environ if name.startswith(("AWS_", "TUNEYARD_"))]:
        del os.environ[name]
    os.environ |= {
        "AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as path,
        Folder(Path(path)) as folder,
        process(
            sys.executable, __file__, "--emulate", str(port), str(folder.aws),
            **emulator.environment(folder, port=port),
        ),
        answering() as hooks,
    ):  # fmt: skip
        wait_for(f"{endpoint}/_ministack/health")
        deploy()
        forget()
        try:
            yield hooks
        finally:
            os.environ.clear()
            os.environ |= before


def forget() -> None:
    """Make every cached client and setting anew: another benchmark may have used another stack."""
    from tuneyard import blobs, bus, queues, table, vault
    from tuneyard.settings import settings

    settings.cache_clear()
    for edge in (table, blobs, queues, bus, vault):
        edge._client.cache_clear()


def deploy() -> None:
    """Create what is not a function, and make its outputs our settings."""
    import boto3
    from samtranslator.yaml_helper import yaml_parse

    template = yaml_parse((ROOT / "template.yaml").read_text())
    kept = {
        name: resource
        for name, resource in template["Resources"].items()
        if not resource["Type"].startswith(("AWS::Serverless", "AWS::Lambda", "AWS::CloudWatch"))
        and "Condition" not in resource
    }
    outputs = {name: value for name, value in template["Outputs"].items() if "Api" not in json.dumps(value)}
    client = boto3.client("cloudformation")
    client.create_stack(StackName="bench", TemplateBody=json.dumps({"Resources": kept, "Outputs": outputs}))
    while (stack := client.describe_stacks(StackName="bench")["Stacks"][0])[
        "StackStatus"
    ] != "CREATE_COMPLETE":
        time.sleep(0.1)
    found = {output["OutputKey"]: output["OutputValue"] for output in stack["Outputs"]}
    from tuneyard_host.local import environment

    os.environ |= environment.settings(found, {"AllowLocalTargets": "true", "FiresPerMinute": "1000000"})
    os.environ["TUNEYARD_BASE_MODELS"] = '[{"id": "b", "source": "b"}]'


class Hooks:
    """What came in at the receiver."""

    def __init__(self, address: str) -> None:
        self.address, self._client = address, httpx.Client(timeout=30)

    def times(self, path: str) -> list[float]:
        """When the deliveries on a path came in, in order."""
        found: Times = self._client.get(f"{self.address}/times").json()
        return sorted(when for name, when in found.items() if name.startswith(f"{path} "))

    def arrived(self, path: str, *, many: int, every: float = 0.01, seconds: float = 300) -> list[float]:
        """When the first so many deliveries on a path came in."""
        until = time.time() + seconds
        while len(found := self.times(path)) < many:
            if time.time() > until:
                raise SystemExit(f"only {len(found)} of {many} deliveries came in")
            time.sleep(every)
        return found


class Evaluated:
    """How many rows the queries evaluate that are made meanwhile."""

    def __init__(self) -> None:
        self.rows = 0

    def __call__(self, parsed: dict[str, Any], **_: Any) -> None:
        self.rows += parsed.get("ScannedCount", 0)


def emulate(port: int, folder: Path) -> None:
    """The emulated AWS as the local stack runs it, with its snapshots."""
    from tuneyard_host.local import emulator

    emulator.serve(socket.create_server(("127.0.0.1", port), backlog=1024), folder)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--receive", port]:
            asyncio.run(receive(int(port)))
        case ["--emulate", port, folder]:
            emulate(int(port), Path(folder))
