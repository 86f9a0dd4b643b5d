"""How fast webhooks are: against a bare loop that signs and posts, beside a dead endpoint, and with a long history.

Run it with ``python benchmarks/webhooks.py [--rows 100000] [--senders 16]``. It starts the emulated AWS and a receiver
as processes of their own, and the real match and send handlers in threads of this one. Read the ratios: the absolute
numbers are those of the machine and of the emulator, which answers each call for the table in about a millisecond.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import statistics
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
def surroundings() -> Iterator[str]:
    """The emulated AWS with the template's table, queues and rule, and a receiver; the receiver's address."""
    port, receiver = free_port(), free_port()
    endpoint, hooks = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{receiver}"
    for name in [name for name in os.environ if name.startswith(("AWS_", "TUNEYARD_"))]:
        del os.environ[name]
    os.environ |= {
        "AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    own = {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "MINISTACK_HOST": "127.0.0.1", "IOT_MTLS_ENABLED": "0",
           "SFTP_ENABLED": "0", "LOG_LEVEL": "ERROR", "PERSIST_STATE": "0"}  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as folder,
        process(sys.executable, "-m", "ministack.app", TMPDIR=folder, **own),
        process(sys.executable, __file__, "--receive", str(receiver)),
    ):
        wait_for(f"{endpoint}/_ministack/health")
        wait_for(f"{hooks}/ok")
        deploy()
        yield hooks


def deploy() -> None:
    """Create what is not a function, and make its outputs our settings."""
    import boto3
    from samtranslator.yaml_helper import yaml_parse

    template = yaml_parse((ROOT / "template.yaml").read_text())
    kept = {
        name: resource
        for name, resource in template["Resources"].items()
        if not resource["Type"].startswith(("AWS::Serverless", "AWS::CloudWatch"))
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


class Bench:
    """A team with a data set, and threads that match and send."""

    def __init__(self, hooks: str, senders: int) -> None:
        from tuneyard import artifacts, credentials, teams
        from tuneyard.records import Identity, Role
        from tuneyard.settings import settings
        from tuneyard_host.local import doors
        from tuneyard_host.local.consumers import Consumer

        module = doors.modules()["webhook_sender"]
        self.hooks, self.settings, self.client = hooks, settings(), httpx.Client(timeout=30)
        self.caller = Identity("acme", "ada", Role.ADMIN, "k")
        teams.create_team("acme")
        teams.create_key(team="acme", user="ada", role=Role.ADMIN)
        credentials.put(self.caller, "SIGN", secrets.token_hex(32))
        self.of, self.version, _ = artifacts.add_version(
            self.caller, "acme/p", "data", files={}, metadata={"a": 1}
        )
        self.match = Consumer(self.settings.event_queue_url, module.match, most=4, hidden=15)
        self.send = Consumer(self.settings.delivery_queue_url, module.send, most=senders, hidden=60)

    def automation(self, path: str, scope: str = "acme/p", **more: Any) -> str:
        """A webhook and an automation of every alias."""
        from tuneyard import automations, webhooks
        from tuneyard.records import EventType

        hook = webhooks.create(
            self.caller, name="n", url=self.hooks + path, access_token=None, secret="SIGN", own_host=""
        )
        fields = {
            "name": "a",
            "event": EventType.ADD_ARTIFACT_ALIAS,
            "alias_regex": ".",
            "webhook_id": hook.id,
        }
        return automations.create(self.caller, scope=scope, fields=fields | more).id

    def delete(self, automation_id: str) -> None:
        """Delete an automation."""
        from tuneyard import automations

        automations.delete(self.caller, automations.get(self.caller, automation_id))

    def fire(self) -> float:
        """Add an alias; when it was done."""
        from tuneyard import labels

        labels.add_alias(self.caller, self.of, self.version, secrets.token_hex(8))
        return time.time()

    def times(self, path: str) -> list[float]:
        """When the deliveries on a path came in, in order."""
        found: Times = self.client.get(f"{self.hooks}/times").json()
        return sorted(when for name, when in found.items() if name.startswith(f"{path} "))

    def arrived(self, path: str, *, many: int, every: float = 0.01, seconds: float = 300) -> list[float]:
        """When the first so many deliveries on a path came in."""
        until = time.time() + seconds
        while len(found := self.times(path)) < many:
            if time.time() > until:
                raise SystemExit(f"only {len(found)} of {many} deliveries came in")
            time.sleep(every)
        return found

    def latencies(self, path: str, many: int) -> list[float]:
        """Seconds from the API's answer to the request at the endpoint, one event after the other."""
        known = len(self.times(path))
        found = []
        for number in range(1, many + 1):
            began = self.fire()
            found.append(self.arrived(path, many=known + number)[-1] - began)
        return sorted(found)


def percentile(values: list[float], share: float) -> float:
    """The value below which this share of the values lies."""
    return values[min(len(values) - 1, int(share * len(values)))]


def told(name: str, text: str) -> None:
    """One line of the report."""
    sys.stdout.write(f"{name:44} {text}\n")
    sys.stdout.flush()


def bare_loop(url: str, many: int, *, pooled: bool) -> float:
    """Requests a second of a loop that signs and posts, with nothing around it."""
    body, key = b'{"type":"ADD_ARTIFACT_ALIAS"}' * 20, b"k" * 64
    with httpx.Client() as client:
        began = time.perf_counter()
        for _ in range(many):
            signature = hmac.new(key, body, hashlib.sha256).hexdigest()
            headers = {"X-Service-Signature": signature, "Content-Type": "application/json"}
            if not pooled:
                headers["Connection"] = "close"
            client.post(url, content=body, headers=headers)
        return many / (time.perf_counter() - began)


def from_event_to_post(bench: Bench) -> None:
    """The time from the API's answer to the POST, with a second endpoint that is healthy too, and one that is dead."""
    measured, other = bench.automation("/measured"), bench.automation("/other")
    bench.latencies("/measured", 5)
    alone = bench.latencies("/measured", 100)
    bench.delete(other)
    dead = bench.automation("/dead")
    beside = bench.latencies("/measured", 100)
    for id in (measured, dead):
        bench.delete(id)
    p50, p99 = (percentile(alone, share) * 1e3 for share in (0.5, 0.99))
    told("event to POST", f"p50 {p50:.0f} ms, p99 {p99:.0f} ms")
    dead50, dead99 = (percentile(beside, share) * 1e3 for share in (0.5, 0.99))
    told(
        "... beside a dead endpoint",
        f"p50 {dead50:.0f} ms, p99 {dead99:.0f} ms; ratios {dead50 / p50:.2f}, {dead99 / p99:.2f}",
    )


def deliveries_a_second(bench: Bench, many: int) -> None:
    """Deliveries of rows that are there already, to 20 webhooks, against the bare loops."""
    from tuneyard import queues

    made = [bench.automation("/rate") for _ in range(20)]
    bench.send.stop()
    for _ in range(many // 20):
        bench.fire()
    while queues.waiting(bench.settings.delivery_queue_url) < many:
        time.sleep(0.2)
    bench.send = type(bench.send)(bench.send.queue_url, bench.send.handler, most=bench.send.most, hidden=60)
    began = time.time()
    bench.send.start()
    rate = many / (bench.arrived("/rate", many=many, every=0.5)[-1] - began)
    pooled, fresh = (bare_loop(f"{bench.hooks}/ok", many, pooled=pooled) for pooled in (True, False))
    told("deliveries a second", f"{rate:.0f}, each claimed, signed, sent and recorded in the table")
    told("... bare httpx loop, a connection for each", f"{fresh:.0f} a second; ratio {rate / fresh:.2f}")
    told("... bare httpx loop, one connection", f"{pooled:.0f} a second; ratio {rate / pooled:.2f}")
    for id in made:
        bench.delete(id)


def fan_out(bench: Bench, many: int) -> None:
    """One event that a thousand automations listen to, with 20 webhooks between them."""
    from tuneyard import ids, table
    from tuneyard.webhook_records import Automation, Delivery

    seeds = [table.get(Automation, bench.automation("/fan")) for _ in range(20)]
    made = [seed.id for seed in seeds if seed is not None]
    while len(made) < many:
        seed = seeds[len(made) % 20]
        assert seed is not None
        made.append(ids.new())
        table.write(table.Put(seed.model_copy(update={"id": made[-1]})))
    began = bench.fire()
    took = bench.arrived("/fan", many=many, every=0.5)[-1] - began
    time.sleep(2)
    rows = [row for id in made for row in table.listed(Delivery, "by_trigger", id, limit=10)]
    sent = len(bench.times("/fan"))
    told(
        f"fan-out of {many}",
        f"{len(rows)} rows, {sent} ids at the endpoint, the last POST after {took:.1f} s",
    )
    for id in made:
        table.write(table.Delete(Automation, (id,)))


def history(bench: Bench, rows: int) -> None:
    """The first, a middle and the last page of a webhook's history, short and long."""
    from tuneyard import deliveries, table
    from tuneyard.webhook_records import Delivery, DeliveryStatus

    def filled(owner: str, many: int) -> None:
        client = table._client()
        for start in range(0, many, 25):
            puts: Any = []
            for number in range(start, min(many, start + 25)):
                row = Delivery(
                    id=f"msg_{owner}{number:08d}", team="acme", webhook_id=owner, automation_id="a", event_id="e",
                    event_type="ADD_ARTIFACT_ALIAS", status=DeliveryStatus.SUCCEEDED, created_at=1000 + number,
                    due_at=0, expires=0,
                )  # fmt: skip
                puts.append({"PutRequest": {"Item": table._item(row)}})
            client.batch_write_item(RequestItems={bench.settings.table_name: puts})

    def page(owner: str, after: str | None) -> float:
        began = time.perf_counter()
        found = deliveries.page("by_webhook", owner, after=after, limit=21, descending=True)
        assert len(found) == 21
        return time.perf_counter() - began

    taken = {}
    for owner, many in (("short", 100), ("long", rows)):
        filled(owner, many)
        middle = f"msg_{owner}{many // 2:08d}"
        taken[owner] = [statistics.median(page(owner, after) for _ in range(20)) for after in (None, middle)]
    for place, name in enumerate(("first", "middle")):
        short, long = taken["short"][place], taken["long"][place]
        told(
            f"history, {name} page of 20",
            f"100 rows {short * 1e3:.1f} ms, {rows} rows {long * 1e3:.1f} ms; ratio {long / short:.2f}",
        )


def main() -> None:
    """Run everything and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--receive", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--senders", type=int, default=16, help="deliveries that are sent at the same time")
    parser.add_argument("--rows", type=int, default=100_000, help="rows of the long history")
    chosen = parser.parse_args()
    if chosen.receive:
        asyncio.run(receive(chosen.receive))
        return
    with surroundings() as hooks:
        bench = Bench(hooks, chosen.senders)
        bench.match.start()
        bench.send.start()
        from_event_to_post(bench)
        deliveries_a_second(bench, 600)
        fan_out(bench, 1000)
        bench.match.stop()
        bench.send.stop()
        history(bench, chosen.rows)


if __name__ == "__main__":
    main()
