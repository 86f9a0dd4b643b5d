"""Crowds at the service's door, on real sockets: thousands at once, slow readers, connections that say nothing."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import psutil
import pytest

from inference_fixtures import TOKEN, House, base_folder, bucket, house, served  # noqa: F401
from tuneyard_host.inference.engine import Limits
from vllm_fixtures import on_a_socket

HEADERS = {"Authorization": f"Bearer {TOKEN}"}
ADAPTERS = (None, "a0", "a1", "a2", "a3")


@pytest.fixture
def crowded(house: House) -> Iterator[tuple[House, str]]:
    """A service with the limits that it has in production, and its address."""
    with served(house.spec, house.bucket) as built:
        built.ask("Warm up", max_tokens=1)
        with on_a_socket(built.app) as address:
            yield built, address


@pytest.fixture(autouse=True)
def _many_files() -> Iterator[None]:
    """As many open files as the system lets us have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def ask_all(address: str, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(base_url=address, headers=HEADERS, timeout=300, limits=limits) as client:
        return await asyncio.gather(*[client.post("/v1/chat/completions", json=body) for body in bodies])


class Memory:
    """The most that this process held while the block ran, above what it held before, in MB."""

    def __enter__(self) -> Memory:
        self._process, self._over = psutil.Process(), threading.Event()
        self._before = self._most = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self._most = max(self._most, self._process.memory_info().rss)

    @property
    def grown(self) -> float:
        return (self._most - self._before) / 1e6


@pytest.mark.slow
def test_two_thousand_at_once_are_all_answered_and_each_rightly(crowded: tuple[House, str], house: House):
    kinds = [(f"Question {i % 20}: what is {i % 7} and {i % 11}?", ADAPTERS[i % 5]) for i in range(100)]
    options = {"temperature": 0, "max_tokens": 4}
    expected = house.ask_all([(text, {"adapter": adapter, **options}) for text, adapter in kinds])
    bodies = [
        house.body(kinds[i % 100][0], adapter=kinds[i % 100][1], project=f"p{i % 9}", **options)
        for i in range(2000)
    ]

    with Memory() as memory:
        answers = asyncio.run(ask_all(crowded[1], bodies))

    assert [answer.status_code for answer in answers] == [200] * 2000
    said = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
    assert said == [expected[i % 100]["choices"][0]["message"]["content"] for i in range(2000)]
    assert len({answer.json()["id"] for answer in answers}) == 2000
    assert len({text for text in said}) > 20
    assert memory.grown < 400
    assert crowded[0].app.state.servers.ready()[house.spec.id].load["waiting"] == 0


@pytest.mark.slow
def test_what_does_not_fit_the_queue_is_503_at_once_and_the_rest_is_answered(house: House):
    with served(house.spec, house.bucket, Limits(rows=8, waiting=100)) as small:
        small.ask("Warm up", max_tokens=1)
        with on_a_socket(small.app) as address:
            answers = asyncio.run(
                ask_all(address, [small.body("Hello", max_tokens=20, ignore_eos=True)] * 600)
            )

    answered = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 503]
    assert len(answered) + len(refused) == 600 and len(answered) >= 100 and len(refused) >= 100
    assert all(
        answer.json()["error"]["code"] == "unavailable" and answer.headers["retry-after"]
        for answer in refused
    )
    assert {answer.json()["usage"]["completion_tokens"] for answer in answered} == {20}


def request(address: str, body: dict[str, Any]) -> socket.socket:
    """A raw connection on which a request was made."""
    host, _, port = address.removeprefix("http://").partition(":")
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {TOKEN}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    connection.sendall(head.encode() + content)
    return connection


def test_readers_of_one_byte_a_second_hold_up_nobody(crowded: tuple[House, str]):
    built, address = crowded
    slow = built.body("Hello", stream=True, logprobs=True, top_logprobs=20, max_tokens=400, ignore_eos=True)
    with ExitStack() as stack:
        readers = [stack.enter_context(request(address, slow)) for _ in range(8)]
        took = []
        for _ in range(3):
            assert all(len(reader.recv(1)) == 1 for reader in readers)
            began = time.monotonic()
            (answer,) = asyncio.run(ask_all(address, [built.body("Quick", max_tokens=4)]))
            took.append(time.monotonic() - began)
            assert answer.status_code == 200
            time.sleep(1)

        assert max(took) < 5
        deadline = time.monotonic() + 60
        while built.app.state.servers.ready()[built.spec.id].load["running"]:
            assert time.monotonic() < deadline, "the engine waits for readers"
            time.sleep(0.1)

    assert asyncio.run(ask_all(address, [built.body("Quick", max_tokens=4)]))[0].status_code == 200


@pytest.mark.slow
def test_five_thousand_silent_connections_do_not_keep_others_out(crowded: tuple[House, str]):
    built, address = crowded
    host, _, port = address.removeprefix("http://").partition(":")
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 10_500:
        pytest.skip("this machine allows too few open files")

    with ExitStack() as stack:
        for _ in range(5000):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
        answers = asyncio.run(ask_all(address, [built.body("Hello", max_tokens=3)] * 20))

    assert [answer.status_code for answer in answers] == [200] * 20
