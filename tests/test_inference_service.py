"""The service's door: who may ask, what is refused and how, and what happens when clients leave or come in crowds."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from safetensors.torch import load as load_tensors
from safetensors.torch import save

from inference_fixtures import TOKEN, House, base_folder, bucket, house, served  # noqa: F401
from tuneyard_host.inference.engine import Engine, Limits

FOREVER = {"ignore_eos": True, "max_tokens": 400}


@pytest.fixture
def small(house: House) -> Iterator[House]:
    """A service with three rows, small chunks and a short queue."""
    with served(house.spec, house.bucket, Limits(rows=3, chunk=16, waiting=40, worth_waiting=8)) as built:
        yield built


@pytest.fixture
def address(small: House) -> Iterator[str]:
    """That service on a real socket."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(small.app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


def load(house: House) -> dict[str, int]:
    """How many sequences run and wait."""

    async def ask() -> Any:
        async with house.client() as client:
            return (await client.get("/health")).json()

    found: dict[str, int] = asyncio.run(ask())["engines"][house.spec.id]
    return found


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Makes each step of an engine take so many seconds longer, so that what takes several is still under way."""
    step = Engine._step

    def slow_down(seconds: float) -> None:
        monkeypatch.setattr(Engine, "_step", lambda engine: time.sleep(seconds) or step(engine))

    return slow_down


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_health_names_the_base_models_without_a_token(house: House) -> None:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(house.app), base_url="http://engine"
        ) as client:
            return await client.get("/health")

    response = asyncio.run(ask())

    assert response.status_code == 200
    assert response.json()["status"] == "ok"
    assert response.json()["base_models"] == ["tuneyard/test"]


@pytest.mark.parametrize(
    "header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer gr\u00fcn"}]
)
def test_only_the_token_opens_the_door(house: House, header: dict[str, str]) -> None:
    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(house.app), base_url="http://engine"
        ) as client:
            encoded = {name: value.encode() for name, value in header.items()}
            return await client.post("/v1/chat/completions", json=house.body(), headers=encoded)

    response = asyncio.run(ask())

    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"


def test_an_unknown_base_model_is_404(house: House) -> None:
    async def ask() -> httpx.Response:
        async with house.client() as client:
            return await client.post("/v1/chat/completions", json=house.body() | {"base_model": "none/such"})

    response = asyncio.run(ask())

    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


REFUSED: list[tuple[str, Any]] = [
    ("best_of", 3), ("use_beam_search", True), ("echo", True), ("bad_words", ["no"]), ("guided_json", {}),
    ("reasoning_effort", "high"), ("audio", {"voice": "x"}), ("functions", [{"name": "f"}]), ("documents", [{}]),
    ("truncate_prompt_tokens", 5), ("chat_template", "{{ 1 }}"), ("length_penalty", 2), ("web_search_options", {}),
    ("response_format", {"type": "xml"}), ("structured_outputs", {"structural_tag": "{}"}), ("logit_bias", {"x": 1}),
    ("logit_bias", {"99999": 1}), ("stop_token_ids", [99999]), ("allowed_token_ids", []),
    ("tools", [{"type": "search"}]), ("cache_salt", "x"), ("priority", 5),
    ("tool_choice", "maybe"), ("prompt_logprobs", 99), ("temperature", -1), ("top_p", 0), ("n", 0), ("n", 500),
]  # fmt: skip


HARMLESS: list[tuple[str, Any]] = [
    ("best_of", 1), ("user", "ada"), ("metadata", {"a": "b"}), ("service_tier", "auto"), ("top_k", 0), ("n", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda value: json.dumps(value)[:20])
def test_an_option_that_cannot_be_honoured_is_refused_by_name(house: House, name: str, value: Any) -> None:
    extra = {"tools": [{"type": "function", "function": {"name": "f"}}]} if name == "tool_choice" else {}

    status, error = house.refused(**{name: value}, **extra)

    assert status == 422
    assert error["param"].startswith(name)
    assert error["code"] == "invalid_value"


@pytest.mark.parametrize(("name", "value"), HARMLESS, ids=lambda value: json.dumps(value)[:20])
def test_options_that_ask_for_nothing_are_let_through(house: House, name: str, value: Any) -> None:
    assert house.ask(max_tokens=1, **{name: value})["choices"]


def test_a_prompt_longer_than_the_context_is_400(house: House) -> None:
    status, error = house.refused("word " * 2000)

    assert (status, error["code"]) == (400, "context_length_exceeded")


def test_prompt_and_answer_longer_than_the_context_are_400(house: House) -> None:
    assert house.refused("Hello", max_tokens=512)[1]["code"] == "context_length_exceeded"


def test_without_a_limit_an_answer_may_fill_the_context(house: House) -> None:
    answer = house.ask("Hello", ignore_eos=True)

    assert answer["usage"]["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"


def test_an_adapter_that_is_not_there_is_404_and_is_looked_for_again(house: House) -> None:
    status, error = house.refused(adapter="late")
    (house.bucket / "late").mkdir()
    for file in (house.bucket / "a1").iterdir():
        (house.bucket / "late" / file.name).write_bytes(file.read_bytes())
    answer = house.ask(adapter="late", max_tokens=4, seed=1)

    assert (status, error["code"]) == (404, "model_not_found")
    assert (
        answer["choices"][0]["message"]
        == house.ask(adapter="a1", max_tokens=4, seed=1)["choices"][0]["message"]
    )


def test_an_adapter_for_another_model_is_refused_with_the_reason(house: House) -> None:
    (house.bucket / "odd").mkdir()
    config = json.loads((house.bucket / "a0" / "adapter_config.json").read_text())
    (house.bucket / "odd" / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    (house.bucket / "odd" / "adapter_model.safetensors").write_bytes(
        (house.bucket / "a0" / "adapter_model.safetensors").read_bytes()
    )

    status, error = house.refused(adapter="odd")

    assert status == 422
    assert "use_dora" in error["message"]


def test_a_crowd_that_names_a_new_adapter_reads_it_once(house: House) -> None:
    (house.bucket / "fresh").mkdir()
    for file in (house.bucket / "a2").iterdir():
        (house.bucket / "fresh" / file.name).write_bytes(file.read_bytes())

    house.ask_all([("Hello", {"adapter": "fresh", "max_tokens": 2})] * 12)

    assert sorted(key for key in house.reads if key.startswith("fresh/")) == [
        "fresh/adapter_config.json", "fresh/adapter_model.safetensors",
    ]  # fmt: skip


def test_a_shared_prompt_is_read_once(house: House) -> None:
    text = "A prompt that nobody else in these tests has, long enough to be worth sharing."

    first = house.ask(text, n=6, max_tokens=3)
    again = house.ask(text, max_tokens=3)
    other = house.ask(text, max_tokens=3, adapter="a4")

    read = first["usage"]["prompt_tokens"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == read - 1
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_prompts_that_wait_for_their_turn_take_what_others_have_read_meanwhile(house: House) -> None:
    text = "Another prompt that nobody else in these tests has, and this time it comes a dozen times at once."
    alone = house.ask(text, adapter="a1", max_tokens=3, temperature=0)

    with served(house.spec, house.bucket, Limits(rows=16, chunk=16, worth_waiting=1000)) as patient:
        answers = patient.ask_all([(text, {"adapter": "a1", "max_tokens": 3, "temperature": 0})] * 12)

    read = alone["usage"]["prompt_tokens"]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached.count(read - 1) >= 6
    assert {answer["choices"][0]["message"]["content"] for answer in answers} == {
        alone["choices"][0]["message"]["content"]
    }


def test_more_requests_than_rows_all_get_their_own_answers(small: House, house: House) -> None:
    asked: list[Any] = [
        (f"{'Shared beginning of a prompt. ' * (i % 3)} Question {i % 5}",
         {"seed": i, "max_tokens": 3 + i % 7, "adapter": (None, "a0", "a5")[i % 3], "project": f"p{i % 4}"})
        for i in range(30)
    ]  # fmt: skip

    crowded = small.ask_all(asked)

    for answer, expected in zip(crowded, house.ask_all(asked), strict=True):
        assert answer["choices"][0]["message"] == expected["choices"][0]["message"]


def test_a_full_queue_is_503_with_retry_after(small: House, slow: Callable[[float], None]) -> None:
    slow(0.005)

    async def ask() -> tuple[httpx.Response, list[httpx.Response]]:
        async with small.client() as client:
            body = small.body("Hello", n=30, max_tokens=60, ignore_eos=True)
            first = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            await asyncio.sleep(0.2)
            refused = await client.post("/v1/chat/completions", json=body)
            return refused, [await first]

    refused, others = asyncio.run(ask())

    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert others[0].status_code == 200


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "whole"])
def test_a_client_that_hangs_up_frees_its_rows(
    small: House, address: str, streamed: bool, slow: Callable[[float], None]
) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    body = small.body("Hello", n=2, stream=streamed, **FOREVER)
    small.ask("Warm up", max_tokens=1)
    slow(0.1)

    with httpx.Client(headers=headers, timeout=httpx.Timeout(10, read=10 if streamed else 0.3)) as client:
        if streamed:
            with client.stream("POST", f"{address}/v1/chat/completions", json=body) as response:
                next(response.iter_lines())
                assert load(small)["running"] >= 1
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{address}/v1/chat/completions", json=body | {"chat": body["chat"] | {"n": 8}})

    wait_until(lambda: load(small)["running"] + load(small)["waiting"] == 0)


def test_a_long_prompt_does_not_hold_up_the_others(small: House, slow: Callable[[float], None]) -> None:
    small.ask("Warm up", max_tokens=1)
    slow(0.05)

    async def both() -> list[str]:
        ended: list[str] = []
        async with small.client() as client:

            async def ask(name: str, text: str, most: int) -> None:
                body = small.body(text, ignore_eos=True, max_tokens=most)
                assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
                ended.append(name)

            long = asyncio.create_task(ask("long", "word " * 150, 1))
            await asyncio.sleep(0.005)
            await asyncio.gather(long, ask("short", "Hello", 6))
        return ended

    assert asyncio.run(both()) == ["short", "long"]


def test_a_project_with_one_request_does_not_wait_behind_anothers_crowd(
    small: House, slow: Callable[[float], None]
) -> None:
    slow(0.01)

    async def race() -> list[str]:
        order: list[str] = []
        async with small.client() as client:

            async def ask(name: str) -> None:
                body = small.body(f"I am {name}", project=name[0], ignore_eos=True, max_tokens=12)
                await client.post("/v1/chat/completions", json=body)
                order.append(name)

            crowd = [asyncio.create_task(ask(f"crowd {i}")) for i in range(20)]
            await asyncio.sleep(0.01)
            await asyncio.gather(*crowd, asyncio.create_task(ask("single")))
        return order

    assert asyncio.run(race()).index("single") < 10


def test_a_checkpoint_of_broken_numbers_harms_nobody_else(small: House) -> None:
    folder = small.bucket / "broken"
    if not folder.exists():
        folder.mkdir()
        tensors = load_tensors((small.bucket / "a0" / "adapter_model.safetensors").read_bytes())
        for tensor in tensors.values():
            tensor.fill_(float("nan"))
        (folder / "adapter_model.safetensors").write_bytes(save(tensors))
        config = (small.bucket / "a0" / "adapter_config.json").read_bytes()
        (folder / "adapter_config.json").write_bytes(config)
    options = {"max_tokens": 12, "seed": 1, "adapter": "a0", "temperature": 0.8}
    expected = small.ask("Hello", **options)["choices"][0]["message"]

    async def crowd() -> list[httpx.Response]:
        async with small.client() as client:
            named = [
                {"adapter": "broken", "logprobs": True},
                options,
                {"adapter": "broken", "temperature": 0},
            ] * 4
            bodies = [small.body("Hello", **named_options) for named_options in named]
            return await asyncio.gather(*[client.post("/v1/chat/completions", json=body) for body in bodies])

    responses = asyncio.run(crowd())

    assert [response.status_code for response in responses] == [422, 200, 422] * 4
    assert all(r.json()["choices"][0]["message"] == expected for r in responses if r.status_code == 200)


def test_template_settings_reach_the_template_and_nothing_else(house: House) -> None:
    status, error = house.refused(chat_template_kwargs={"chat_template": "{{ 1 }}"})

    assert (status, error["param"]) == (422, "chat_template_kwargs")
    assert house.ask(chat_template_kwargs={"enable_thinking": False}, max_tokens=1)["choices"]


def test_a_call_cannot_be_required_without_tools(house: House) -> None:
    status, error = house.refused(tool_choice="required")

    assert (status, error["param"]) == (422, "tool_choice")
