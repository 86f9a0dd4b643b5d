"""What the webhook tests share: a receiver that misbehaves on order, a clock to turn, and the queues run by hand."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import botocore.client
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from fastapi.testclient import TestClient

from tuneyard import automations, clock, deliveries, outbound, sender, table
from tuneyard.queues import Ring
from tuneyard.settings import Settings, settings
from tuneyard.webhook_records import Delivery
from tuneyard_host.local import doors

Script = Callable[[socket.socket], None]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@dataclass
class Received:
    """A request as it came in."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


def answer(status: int, body: bytes = b"", **headers: str) -> Script:
    """Answer with this status, body and headers."""
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return lambda connection: connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)


def raw(sent: bytes) -> Script:
    """Answer with exactly these bytes."""
    return lambda connection: connection.sendall(sent)


def drip(head: bytes, *, every: float, seconds: float = 60) -> Script:
    """Send the head, then one byte at a time."""

    def play(connection: socket.socket) -> None:
        connection.sendall(head)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            connection.sendall(b"x")
            time.sleep(every)

    return play


def reset(head: bytes = b"") -> Script:
    """Send the head, then end the connection with a reset."""

    def play(connection: socket.socket) -> None:
        if head:
            connection.sendall(head)
            time.sleep(0.1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    return play


@dataclass
class Receiver:
    """A customer's endpoint: it keeps what it gets, and answers each path as it was told, in turn, then 200."""

    listener: socket.socket
    tls: ssl.SSLContext | None = None
    received: list[Received] = field(default_factory=list)
    scripts: dict[str, list[Script]] = field(default_factory=dict)
    server_names: list[str] = field(default_factory=list)
    connections: int = 0

    @property
    def port(self) -> int:
        """Its port."""
        return int(self.listener.getsockname()[1])

    def url(self, path: str = "/hook") -> str:
        """Its address on this machine."""
        return f"http://127.0.0.1:{self.port}{path}"

    def on(self, path: str, *scripts: Script) -> str:
        """Answer the next requests on a path like this; the address of the path."""
        self.scripts[path] = list(scripts)
        return self.url(path)

    def always(self, path: str, script: Script) -> str:
        """Answer every request on a path like this; the address of the path."""
        return self.on(path, *[script] * 10_000)

    def at(self, path: str) -> list[Received]:
        """What came in on a path."""
        return [one for one in self.received if one.path == path]

    def serve(self) -> None:
        """Take connections until the listener is closed."""
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._handle, args=(connection,), daemon=True).start()

    def _handle(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.closing(connection):
            connection.settimeout(30)
            if self.tls is not None:
                connection = self.tls.wrap_socket(connection, server_side=True)
            self._answer(connection)
            connection.close()

    def _answer(self, connection: socket.socket) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            chunk = connection.recv(65536)
            if not chunk:
                return
            data += chunk
        head, _, body = data.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        while len(body) < int(headers.get("content-length", 0)):
            body += connection.recv(65536)
        method, path, _ = lines[0].split(" ")
        self.received.append(Received(method, path, headers, body))
        waiting = self.scripts.get(path, [])
        (waiting.pop(0) if waiting else raw(OK))(connection)


@contextlib.contextmanager
def receiving(tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    """A receiver on a free port, until the block ends."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    one = Receiver(listener, tls)
    threading.Thread(target=one.serve, daemon=True).start()
    try:
        yield one
    finally:
        listener.close()


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Settings, where no account is needed."""
    for name, known in Settings.model_fields.items():
        if known.is_required() and f"TUNEYARD_{name.upper()}" not in os.environ:
            monkeypatch.setenv(f"TUNEYARD_{name.upper()}", "none")
    if os.environ["TUNEYARD_BASE_MODELS"] == "none":
        monkeypatch.setenv("TUNEYARD_BASE_MODELS", '[{"id": "b", "source": "b"}]')
    settings.cache_clear()
    yield
    settings.cache_clear()


@pytest.fixture
def receiver(configured: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """A local endpoint, on a machine where webhooks may go to local addresses."""
    monkeypatch.setenv("TUNEYARD_ALLOW_LOCAL_TARGETS", "true")
    settings.cache_clear()
    with receiving() as one:
        yield one


@pytest.fixture
def authority(tmp_path: Path) -> Iterator[tuple[Path, ssl.SSLContext]]:
    """A certificate of ``secure.example``, and the server's half of it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "secure.example")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("secure.example")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    cert, private = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, private)
    outbound._tls.cache_clear()
    yield cert, context
    outbound._tls.cache_clear()


class Killed(BaseException):
    """The process ends here."""


@contextlib.contextmanager
def aws_calls(
    *, before: Callable[[str, Any], None] | None = None, after: Callable[[str, Any], None] | None = None
) -> Iterator[None]:
    """Tell of every call to AWS, before it is made or when it took its effect; what is raised there ends the caller."""
    real = botocore.client.BaseClient._make_api_call

    def told(self: Any, operation: str, parameters: Any) -> Any:
        asked = dict(parameters)  # the table's client empties what it is given
        if before is not None:
            before(operation, asked)
        answer = real(self, operation, parameters)
        if after is not None:
            after(operation, asked)
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.client.BaseClient, "_make_api_call", told)
        yield


def match(message: dict[str, Any]) -> None:
    """Hand the message of an event to the real handler, which lets what ends the process pass."""
    record = {"messageId": message["MessageId"], "body": message["Body"]}
    assert doors.modules()["webhook_sender"].match({"Records": [record]}, None) == {"batchItemFailures": []}


def send(message: dict[str, Any]) -> None:
    """Hand a message that rings for deliveries to the real handler."""
    record = {"messageId": message["MessageId"], "body": message["Body"]}
    assert doors.modules()["webhook_sender"].send({"Records": [record]}, None) == {"batchItemFailures": []}


@dataclass
class Office:
    """The post office: the real handlers on what really lies in the queues, and a clock that can be turned."""

    api: TestClient
    now: int = 1_800_000_000_000

    def turn(self, *, seconds: float = 0, minutes: float = 0, hours: float = 0, days: float = 0) -> None:
        """Turn the clock forward."""
        self.now += round(1000 * (seconds + 60 * minutes + 3600 * hours + 86400 * days))

    def run(self, *, twice: bool = False) -> None:
        """Match and send until both queues are empty; ``twice`` hands every message over two times."""
        module = doors.modules()["webhook_sender"]
        busy = True
        while busy:
            busy = False
            for url, work in (
                (settings().event_queue_url, module.match),
                (settings().delivery_queue_url, module.send),
            ):
                for message in self.messages(url):
                    busy = True
                    for _ in range(2 if twice else 1):
                        record = {"messageId": message["MessageId"], "body": message["Body"]}
                        assert work({"Records": [record]}, None) == {"batchItemFailures": []}

    def matched(self) -> list[dict[str, Any]]:
        """Match what happened; the messages that ring for the deliveries, taken from their queue."""
        for message in self.messages(settings().event_queue_url):
            match(message)
        return self.messages(settings().delivery_queue_url)

    def messages(self, url: str) -> list[dict[str, Any]]:
        """Take what is in a queue now."""
        client = boto3.client("sqs")
        found: list[dict[str, Any]] = []
        while got := client.receive_message(QueueUrl=url, MaxNumberOfMessages=10).get("Messages", []):
            found += got
            for one in got:
                client.delete_message(QueueUrl=url, ReceiptHandle=one["ReceiptHandle"])
        return found

    def rule(self, event: str) -> str:
        """A rule of the operator's own on the bus; the address of the queue that it fills."""
        url = boto3.client("sqs").create_queue(QueueName="operator")["QueueUrl"]
        pattern = json.dumps({"detail-type": [event]})
        boto3.client("events").put_rule(Name="operator", EventBusName="office", EventPattern=pattern)
        _fill("operator", url)
        return url

    def due(self, delivery_id: str) -> None:
        """Let the time come at which a delivery is due, and send it: by its message, or by the sweep's."""
        row = self.row(delivery_id)
        self.now = max(self.now, row.due_at)
        if row.rung:
            sender.send(Ring.of(row), now=self.now)
        else:
            deliveries.sweep(self.now)
            self.run()

    def row(self, delivery_id: str) -> Delivery:
        """A delivery's row."""
        row = table.get(Delivery, delivery_id)
        assert row is not None
        return row

    def secret(self, name: str, value: str, **more: Any) -> dict[str, Any]:
        """Store a secret."""
        return self._ok(self.api.put(f"/v1/teams/acme/secrets/{name}", json={"value": value, **more}))

    def webhook(self, url: str, **more: Any) -> str:
        """Make a webhook; its id."""
        body = {"name": "hook", "url": url, **more}
        return str(self._ok(self.api.post("/v1/teams/acme/webhooks", json=body))["id"])

    def automation(self, webhook_id: str, event: str = "ADD_ARTIFACT_ALIAS", **more: Any) -> str:
        """Make an automation of the project ``p``; its id."""
        scope = {"type": "project", "entity": "acme", "project": "p"}
        body = {"name": "a", "team": "acme", "scope": scope, "event": event, "webhook_id": webhook_id, **more}
        if event == "ADD_ARTIFACT_ALIAS":
            body.setdefault("alias_regex", ".*")
        return str(self._ok(self.api.post("/v1/automations", json=body))["id"])

    def version(self, name: str = "data", **metadata: Any) -> str:
        """Make a version of a data set in the project ``p``; the path of it. Its own event is thrown away."""
        path = f"/v1/projects/acme/p/collections/{name}/versions"
        made = self._ok(self.api.post(path, json={"metadata": metadata}))
        self.messages(settings().event_queue_url)
        return f"{path}/{made['version']}"

    def alias(self, path: str, alias: str) -> dict[str, Any]:
        """Give a version an alias."""
        from urllib.parse import quote

        return self._ok(self.api.put(f"{path}/aliases/{quote(alias, safe='')}"))

    def history(self, automation_id: str) -> list[dict[str, Any]]:
        """What an automation fired, the newest first."""
        data: list[dict[str, Any]] = self._ok(self.api.get(f"/v1/automations/{automation_id}/executions"))[
            "data"
        ]
        return data

    def delivery(self, delivery_id: str) -> dict[str, Any]:
        """A delivery as the API shows it."""
        return self._ok(self.api.get(f"/v1/deliveries/{delivery_id}"))

    def fire(self, url: str, *, payload: str | None = None, alias: str = "production", **hook: Any) -> str:
        """Make a webhook and an automation, have it fire and be sent; the id of the delivery."""
        automation = self.automation(self.webhook(url, **hook), payload=payload)
        self.alias(self.version(), alias)
        self.run()
        (one,) = self.history(automation)
        return str(one["id"])

    @staticmethod
    def _ok(response: Any) -> dict[str, Any]:
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found


@pytest.fixture
def office(aws: dict[str, str], api: TestClient, monkeypatch: pytest.MonkeyPatch) -> Office:
    """The post office of team ``acme``, its clock in our hands; moto makes no rule with a target from a template."""
    events = boto3.client("events")
    events.create_event_bus(Name="office")
    monkeypatch.setenv("TUNEYARD_BUS_NAME", "office")
    settings.cache_clear()
    pattern = json.dumps(
        {"source": ["tuneyard"], "detail-type": [event.value for event in automations.EVENTS]}
    )
    events.put_rule(Name="rule", EventBusName="office", EventPattern=pattern)
    _fill("rule", settings().event_queue_url)
    one = Office(api)
    monkeypatch.setattr(clock, "now_ms", lambda: one.now)
    return one


def _fill(rule: str, url: str) -> None:
    """Have a rule put what it finds into a queue."""
    queue = boto3.client("sqs").get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])
    target = {"Id": "q", "Arn": queue["Attributes"]["QueueArn"]}
    boto3.client("events").put_targets(Rule=rule, EventBusName="office", Targets=[target])
