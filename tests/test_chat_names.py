"""What a model's name stands for in chat, at every moment; and what the door does for a crowd and for who leaves it."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from fastapi.testclient import TestClient

from chat_fixtures import CHAT, HELLO, commit, door, files_of, model, new_model, send, trained  # noqa: F401
from inference_fixtures import base_folder, bucket  # noqa: F401
from tuneyard import table
from tuneyard.settings import settings
from vllm_fixtures import on_a_socket


def message(door: TestClient, name: str) -> str:
    response = send(door, model=name, seed=1, max_tokens=8)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def test_a_checkpoint_answers_and_is_gone_the_moment_it_is_deleted(
    door: TestClient, model: dict[str, Any], trained: str
):
    before = [send(door, model=f"{trained}:step1", seed=1), send(door, model=trained, seed=1)]
    door.request(
        "DELETE", f"/v1/preview/models/{model['id']}/checkpoints", json={"steps": [1]}
    ).raise_for_status()
    after = send(door, model=f"{trained}:step1", seed=1)
    base = [send(door, model=name, seed=1) for name in (trained, "tuneyard/test")]

    assert [answer.status_code for answer in before] == [200, 200]
    assert (after.status_code, after.json()["error"]["code"]) == (404, "model_not_found")
    told = [answer.json()["choices"][0]["message"] for answer in [*before, *base]]
    assert told[0] == told[1] != told[2] == told[3]
    assert before[0].json()["choices"][0]["token_ids"]


def test_latest_is_the_newest_checkpoint_the_moment_it_exists(
    door: TestClient, model: dict[str, Any], trained: str, bucket: Path
):
    first = [message(door, trained) for _ in range(2)]
    commit(door, model, files_of(bucket / "a1"), step=2)
    second = message(door, trained)

    assert first == [message(door, f"{trained}:step1")] * 2
    assert second == message(door, f"{trained}:step2") == message(door, f"{trained}:latest") != first[0]


def test_an_alias_is_followed_the_moment_it_moves(
    door: TestClient, model: dict[str, Any], trained: str, bucket: Path
):
    commit(door, model, files_of(bucket / "a1"), step=2)
    versions = f"/v1/projects/{model['entity']}/p/collections/{model['name']}/versions"
    said = []
    for step in (1, 2):
        door.put(f"{versions}/{step}/aliases/best").raise_for_status()
        said += [message(door, f"{trained}:best") for _ in range(2)]
    door.delete(f"{versions}/2/aliases/best").raise_for_status()

    assert send(door, model=f"{trained}:best").status_code == 404
    one, two = (message(door, f"{trained}:step{step}") for step in (1, 2))
    assert said == [one, one, two, two] and one != two


def test_another_model_under_the_name_of_a_deleted_one_starts_from_its_base(
    door: TestClient, model: dict[str, Any], trained: str
):
    before = [message(door, trained) for _ in range(2)]
    door.delete(f"/v1/preview/models/{model['id']}").raise_for_status()
    gone = send(door, model=trained)
    again = new_model(door, model["name"])

    assert gone.status_code == 404 and again["inference_name"] == trained
    assert message(door, trained) == message(door, "tuneyard/test") != before[0]


def test_a_crowd_on_one_model_reads_the_table_a_few_times_and_each_gets_its_answer(
    door: TestClient, trained: str
):
    message(door, trained)
    reads: list[str] = []
    watched = table._client().meta.events
    watched.register("before-call.dynamodb", lambda model, **_: reads.append(model.name), unique_id="crowd")
    bodies = [{"model": trained, "messages": HELLO, "seed": n % 7, "max_tokens": 4} for n in range(60)]

    async def ask(address: str) -> list[dict[str, Any]]:
        headers = {"Authorization": door.headers["authorization"]}
        async with aiohttp.ClientSession(address, headers=headers) as client:

            async def one(body: dict[str, Any]) -> dict[str, Any]:
                async with client.post(CHAT, json=body) as response:
                    assert response.status == 200
                    answer: dict[str, Any] = await response.json()
                    return answer

            return await asyncio.gather(*[one(body) for body in bodies])

    with on_a_socket(door.app) as address:
        answers = asyncio.run(ask(address))
    watched.unregister("before-call.dynamodb", unique_id="crowd")

    assert 1 <= reads.count("BatchGetItem") < 30 and len(reads) < 40
    said = [answer["choices"][0]["token_ids"] for answer in answers]
    assert said == [said[n % 7] for n in range(60)] and len({str(tokens) for tokens in said}) > 3


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_who_hangs_up_at_the_door_is_worked_for_no_longer(door: TestClient, stream: bool):
    send(door)
    body = {"model": "tuneyard/test", "messages": HELLO, "n": 64, "ignore_eos": True, "stream": stream}
    headers = {"Authorization": door.headers["authorization"]}

    def running() -> int:
        busy = engine.get("/health").json()["engines"]["tuneyard/test"]
        return int(busy["running"] + busy["waiting"])

    def ask_and_leave(client: httpx.Client) -> float:
        if stream:
            with client.stream("POST", CHAT, json=body) as response:
                next(response.iter_lines())
                time.sleep(1)
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(CHAT, json=body, timeout=1)
        return time.monotonic()

    with (
        on_a_socket(door.app) as address,
        httpx.Client(base_url=address, headers=headers) as client,
        httpx.Client(base_url=settings().inference_engine_url) as engine,
        ThreadPoolExecutor(1) as pool,
    ):
        asked, most = pool.submit(ask_and_leave, client), 0
        while not asked.done():
            most = max(most, running())
        while running():
            time.sleep(0.02)
        took = time.monotonic() - asked.result()

    assert most > 0 and took < 1
