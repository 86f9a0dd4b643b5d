"""Several senders, and crowds of deliveries of one webhook, on the live local stack."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from test_webhooks_live import Customer, customer, until  # noqa: F401
from webhook_fixtures import OK, drip

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]


class Busy:
    """An endpoint that takes its time, and notes how many requests it has at once and which processes they are from."""

    def __init__(self, senders: list[int]) -> None:
        self.senders, self.seen = senders, set[int]()
        self.now = self.most = 0
        self._lock = threading.Lock()

    def __call__(self, connection: socket.socket) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        port = connection.getpeername()[1]
        self.seen |= {pid for pid in self.senders if port in _ports(pid)}
        time.sleep(0.15)
        with self._lock:
            self.now -= 1
        connection.sendall(OK)


def _ports(pid: int) -> list[int]:
    return [one.laddr.port for one in psutil.Process(pid).net_connections("tcp4")]


@contextmanager
def one_more_sender(stack: Any) -> Iterator[int]:
    """A second sender on the queues of the stack, as on another machine; the number of its process."""
    known = json.loads((stack.state / "environment.json").read_text())
    command = [sys.executable, "-m", "tuneyard_host.cli", "sender"]
    with subprocess.Popen(command, env=os.environ | known) as process:
        try:
            until(lambda: len(_ports(process.pid)) >= 2)
            yield process.pid
        finally:
            process.terminate()


def own_sender(stack: Any) -> int:
    """The number of the process of the stack's sender."""
    children = psutil.Process(stack.pid).children()
    return next(child.pid for child in children if "sender" in child.cmdline())


def versions(customer: Customer) -> str:
    """The path of a data set's first version."""
    path = f"/v1/projects/{customer.team}/{customer.project}/collections/data/versions"
    customer.post(path, {})
    return f"{path}/0"


def deliveries_of(customer: Customer, hook: str) -> list[dict[str, Any]]:
    """All deliveries of a webhook."""
    return customer.every(f"/v1/teams/{customer.team}/webhooks/{hook}/deliveries")


def test_two_senders_share_the_places_of_a_webhook_and_send_each_delivery_once(
    customer: Customer,
    stack: Any,
):
    hook, version = customer.webhook(customer.receiver.url("/busy")), versions(customer)
    made = {customer.automation(hook, "ADD_ARTIFACT_TAG") for _ in range(30)}
    with one_more_sender(stack) as other:
        busy = Busy([own_sender(stack), other])
        customer.receiver.always("/busy", busy)

        events = 0
        while events < 4 or (busy.seen != set(busy.senders) and events < 40):
            customer.put(f"{version}/tags/t{events}")
            events += 1
        customer.arrived("/busy", 30 * events)

        until(lambda: busy.now == 0)
        rows = customer.every(f"/v1/teams/{customer.team}/webhooks/{hook}/deliveries")
        until(lambda: {row["status"] for row in deliveries_of(customer, hook)} == {"succeeded"})
        rows = deliveries_of(customer, hook)
    assert {row["automation_id"] for row in rows} == made and len(rows) == 30 * events
    assert sorted(got.headers["webhook-id"] for got in customer.receiver.received) == sorted(
        row["id"] for row in rows
    )
    assert busy.seen == set(busy.senders)
    assert 5 < busy.most <= 10


def test_hundreds_of_due_deliveries_of_a_dead_endpoint_hold_up_nobody_else(customer: Customer):
    dead, version = customer.webhook(customer.receiver.url("/dead")), versions(customer)
    customer.receiver.always("/dead", drip(b"", every=1))
    for _ in range(60):
        customer.automation(dead, "ADD_ARTIFACT_TAG")
    customer.listens("/healthy", "ADD_ARTIFACT_ALIAS", alias_regex="^a", payload={"alias": "${alias}"})
    try:
        for number in range(5):
            customer.put(f"{version}/tags/t{number}")
        customer.arrived("/dead", 10)

        waits = []
        for number in range(15):
            began = time.monotonic()
            customer.put(f"{version}/aliases/a{number}")
            customer.arrived("/healthy", number + 1)
            waits.append(time.monotonic() - began)

        crowd = deliveries_of(customer, dead)
        assert len(crowd) == 300 and {row["status"] for row in crowd} <= {"pending", "attempting"}
        assert max(waits) < 5 and sorted(waits)[7] < 1, waits
    finally:
        path = f"/v1/teams/{customer.team}/webhooks/{dead}"
        customer.http.patch(path, json={"enabled": False})
