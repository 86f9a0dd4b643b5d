"""vLLM behind the same door, against a stand-in on a real socket: names, options, adapters, errors, streams."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from inference_fixtures import TOKEN, base_folder, bucket  # noqa: F401
from tuneyard.completions import ChatRequest
from tuneyard.errors import NotFound
from tuneyard.settings import BaseModelSpec
from tuneyard_host.inference.meter import Meter
from tuneyard_host.inference.service import create_app
from tuneyard_host.inference.vllm import adapters, wire
from vllm_fixtures import BASE, KEY, FakeVllm, on_a_socket

ROLLOUT = {"logprobs": True, "return_tokens_as_token_ids": True, "return_token_ids": True}


@dataclass
class House:
    """A service in front of a stand-in, and what it read and booked."""

    fake: FakeVllm
    client: httpx.Client
    folder: Path
    reads: list[str]
    booked: Counter[str]

    def body(self, text: str = "Hello there", adapter: str | None = None, **options: Any) -> dict[str, Any]:
        chat = {"model": "acme/p/m", "messages": [{"role": "user", "content": text}], **options}
        named = None if adapter is None else {"checkpoint_id": adapter, "prefix": f"{adapter}/"}
        return {"chat": chat, "base_model": "tuneyard/big", "adapter": named, "team": "t", "project": "p"}

    def post(self, *args: Any, **options: Any) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json=self.body(*args, **options))

    def ask(self, *args: Any, **options: Any) -> dict[str, Any]:
        response = self.post(*args, **options)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def stream(self, *args: Any, **options: Any) -> list[Any]:
        with self.client.stream(
            "POST", "/v1/chat/completions", json=self.body(*args, stream=True, **options)
        ) as response:
            assert response.status_code == 200, response.read()
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def refused(self, *args: Any, **options: Any) -> tuple[int, str, str | None]:
        response = self.post(*args, **options)
        error = response.json()["error"]
        return response.status_code, error["code"], error["param"]


@pytest.fixture
def fake() -> FakeVllm:
    return FakeVllm()


@pytest.fixture
def house(fake: FakeVllm, bucket: Path, tmp_path: Path) -> Iterator[House]:
    with on_a_socket(fake.app) as vllm, service(fake, vllm, bucket, tmp_path) as built:
        yield built


class service:
    """The inference service for this vLLM, on a socket of its own; entered again, it is a new life of it."""

    def __init__(self, fake: FakeVllm, vllm: str, bucket: Path, folder: Path, key: str = KEY) -> None:
        self.reads: list[str] = []
        self.booked: Counter[str] = Counter()
        spec = BaseModelSpec(
            id="tuneyard/big", source="none", engine_url=vllm, engine_folder=str(folder / "loras"), engine_adapters=2
        )  # fmt: skip
        meter = Meter(per_key=100, per_project=100, book=lambda _, **counts: self.booked.update(counts))

        def read_blob(key: str) -> bytes:
            self.reads.append(key)
            if not (bucket / key).exists():
                raise NotFound(f"No object {key!r}.")
            return (bucket / key).read_bytes()

        app = create_app([spec], read_blob, TOKEN, meter=meter, vllm_api_key=key)
        self._socket = on_a_socket(app)
        self._made = lambda url: House(
            fake,
            httpx.Client(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30),
            folder / "loras",
            self.reads,
            self.booked,
        )

    def __enter__(self) -> House:
        self._house = self._made(self._socket.__enter__())
        return self._house

    def __exit__(self, *_: Any) -> None:
        self._house.client.close()
        self._socket.__exit__(None, None, None)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_base_model_answers_under_the_name_that_the_client_used(house: House):
    answer = house.ask(n=2, max_tokens=3)

    assert answer["model"] == "acme/p/m" and answer["object"] == "chat.completion"
    assert [len(choice["message"]["content"].split()) for choice in answer["choices"]] == [3, 3]
    assert answer["usage"]["completion_tokens"] == 6
    assert "kv_transfer_params" not in answer and "routed_experts" not in answer["choices"][0]
    assert house.fake.bodies[0]["model"] == BASE


def test_every_option_is_spelled_out_and_none_takes_vllms_own_default(house: House):
    house.ask()
    house.ask(
        temperature=0.5,
        top_k=7,
        seed=3,
        stop="x",
        structured_outputs={"choice": ["a"]},
        user="ada",
        tool_choice="auto",
    )

    plain, chosen = house.fake.bodies
    spelled = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "n": 1,
               "presence_penalty": 0.0, "frequency_penalty": 0.0}  # fmt: skip
    assert spelled.items() <= plain.items() and "tools" not in plain and "seed" not in plain
    wanted = {
        "temperature": 0.5,
        "top_k": 7,
        "seed": 3,
        "stop": ["x"],
        "structured_outputs": {"choice": ["a"]},
    }
    assert wanted.items() <= chosen.items() and not {"user", "tool_choice"} & chosen.keys()


def test_a_rollout_carries_its_tokens_and_their_log_probabilities(house: House):
    (choice,) = house.ask(adapter="a0", **ROLLOUT)["choices"]

    told = [int(token["token"].removeprefix("token_id:")) for token in choice["logprobs"]["content"]]
    assert told == choice["token_ids"] and len(told) == 5


def test_a_crowd_that_names_a_new_adapter_loads_it_once_and_each_adapter_answers_for_itself(house: House):
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda i: house.ask(adapter=f"a{i % 2}"), range(12)))

    assert sorted(house.fake.log) == ["load tuneyard-a0", "load tuneyard-a1"]
    assert len(house.reads) == 4 and (house.folder / "tuneyard-a0" / "adapter_model.safetensors").exists()
    said = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert said[0] != said[1] and said == said[:2] * 6


def test_the_longest_unused_adapters_are_unloaded_and_their_files_go(house: House):
    for name in ("a0", "a1", "a2", "a0", "a3"):
        house.ask(adapter=name)

    until(lambda: len(house.fake.loaded) == 2)
    assert set(house.fake.loaded) == {"tuneyard-a0", "tuneyard-a3"}
    until(lambda: {path.name for path in house.folder.iterdir()} == set(house.fake.loaded))
    assert house.fake.most_at_once <= 3


def test_an_adapter_with_a_request_under_way_is_never_unloaded(house: House):
    house.fake.pause = 0.02
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(house.stream, adapter="a0", max_tokens=30)
        until(lambda: "tuneyard-a0" in house.fake.loaded)
        for name in ("a1", "a2", "a3", "a4"):
            house.ask(adapter=name)
        assert "unload tuneyard-a0" not in house.fake.log and not long.done()
        chunks = long.result()

    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    until(lambda: len(house.fake.loaded) == 2)


def test_adapters_that_idle_are_unloaded(house: House, monkeypatch: pytest.MonkeyPatch):
    house.ask(adapter="a0")
    monkeypatch.setattr(adapters, "IDLE_SECONDS", 0.0)
    house.ask(adapter="a1")

    until(lambda: not house.fake.loaded)


def test_a_vllm_that_was_started_again_gets_its_adapters_again(house: House):
    before = house.ask(adapter="a0")
    house.fake.loaded.clear()

    after = house.ask(adapter="a0")
    assert after["choices"] == before["choices"]
    house.fake.loaded.clear()
    assert house.stream(adapter="a0")[-1]["choices"][0]["finish_reason"] == "length"


def test_a_service_that_was_started_again_takes_over_what_is_loaded(
    fake: FakeVllm, bucket: Path, tmp_path: Path
):
    with on_a_socket(fake.app) as vllm:
        for names in (["a0", "a1"], ["a1", "a2", "a3"]):
            with service(fake, vllm, bucket, tmp_path) as house:
                for name in names:
                    house.ask(adapter=name)
                until(lambda: len(fake.loaded) == 2)

    assert set(fake.loaded) == {"tuneyard-a2", "tuneyard-a3"}


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_adds_up_to_the_whole_answer(house: House, n: int):
    whole = house.ask(adapter="a0", n=n, **ROLLOUT)

    chunks = house.stream(adapter="a0", n=n, **ROLLOUT)

    assert all("usage" not in chunk and chunk["model"] == "acme/p/m" for chunk in chunks)
    for i, choice in enumerate(whole["choices"]):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == i]
        assert "".join(c["delta"].get("content") or "" for c in mine) == choice["message"]["content"]
        assert [t for c in mine for t in c.get("token_ids", [])] == choice["token_ids"]
        assert mine[-1]["finish_reason"] == "length"


def test_usage_is_streamed_when_asked_for_and_counts_all_choices(house: House):
    options = {"include_usage": True, "continuous_usage_stats": True}

    *chunks, last = house.stream("Hello there", n=2, stream_options=options)
    plain = house.stream("Hello there", stream_options={"include_usage": True})

    assert (
        last["usage"]
        == chunks[-1]["usage"]
        == {"prompt_tokens": 2, "completion_tokens": 10, "total_tokens": 12}
    )
    assert [chunk["usage"] for chunk in plain[:-1]] == [None] * (len(plain) - 1)
    assert plain[-1]["choices"] == [] and plain[-1]["usage"]["completion_tokens"] == 5


def test_a_named_tool_ends_with_tool_calls(house: House):
    tools = [{"type": "function", "function": {"name": "f"}}]
    answer = house.ask(tools=tools, tool_choice={"type": "function", "function": {"name": "f"}})

    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"text": "word " * 99}, (400, "context_length_exceeded", "messages")),
        ({"text": "refuse"}, (422, "invalid_value", "temperature")),
        ({"text": "busy"}, (429, "rate_limit_exceeded", None)),
        ({"adapter": "nowhere"}, (404, "model_not_found", None)),
        ({"guided_json": {}}, (422, "invalid_value", "guided_json")),
        ({"chat_template": "{{ 1 }}"}, (422, "invalid_value", "chat_template")),
        ({"temperature": -1}, (422, "invalid_value", "temperature")),
    ],
    ids=lambda value: str(value)[:30],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_errors_come_in_our_form(house: House, options: dict[str, Any], expected: Any, stream: bool):
    assert house.refused(**options, stream=stream) == expected


def test_a_broken_adapter_is_refused_with_the_reason_and_leaves_no_files(house: House, bucket: Path):
    (bucket / "torn").mkdir(exist_ok=True)
    (bucket / "torn" / "adapter_config.json").write_text("{}")
    (bucket / "torn" / "adapter_model.safetensors").write_bytes(b"torn")

    assert house.refused(adapter="torn") == (422, "invalid_value", "model")
    assert list(house.folder.iterdir()) == []
    assert house.ask(adapter="a0")


def test_a_vllm_that_may_not_load_at_run_time_is_503_and_the_sentence_says_what_to_set(house: House):
    house.fake.runtime_loading = False
    response = house.post(adapter="a0")

    assert response.status_code == 503 and "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in response.text
    assert response.headers["retry-after"]
    assert house.ask()


def test_a_wrong_key_and_a_vllm_that_is_gone_are_503(fake: FakeVllm, bucket: Path, tmp_path: Path):
    with on_a_socket(fake.app) as vllm:
        with service(fake, vllm, bucket, tmp_path, key="wrong") as locked_out:
            assert locked_out.refused()[:2] == (503, "unavailable")
        with service(fake, "http://127.0.0.1:9", bucket, tmp_path) as alone:
            response = alone.post(adapter="a0", stream=True)
            assert (response.status_code, response.headers["retry-after"]) == (503, "5")


def test_an_error_in_mid_stream_is_an_event_in_our_form(house: House):
    *chunks, last = house.stream("break")

    assert len(chunks) == 3
    assert last["error"]["type"] == "server_error" and "EngineCore" not in last["error"]["message"]


@pytest.mark.parametrize("adapter", [None, "a0"])
def test_a_client_that_hangs_up_ends_its_request_at_vllm_and_what_it_used_is_booked(
    house: House, adapter: str | None
):
    house.fake.pause = 0.02
    body = house.body("three words here", adapter, stream=True, max_tokens=60)
    with house.client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        while "content" not in next(lines):
            pass

    until(lambda: house.booked["requests"] == 1)
    until(lambda: house.fake.aborted == 1)
    assert house.booked["prompt_tokens"] == 3 and house.booked["completion_tokens"] < 60
    assert house.client.get("/health").json()["engines"]["tuneyard/big"]["running"] == 0


@pytest.mark.parametrize("adapter", [None, "a0"])
def test_of_a_whole_answer_that_is_given_up_the_prompt_is_booked(house: House, adapter: str | None):
    house.fake.pause = 0.1
    body = house.body(
        "three words here", adapter, max_tokens=60, tools=[{"type": "function", "function": {"name": "f"}}]
    )
    with pytest.raises(httpx.ReadTimeout):
        house.client.post("/v1/chat/completions", json=body, timeout=1)

    until(lambda: house.booked["requests"] == 1)
    assert (house.booked["prompt_tokens"], house.booked["completion_tokens"]) == (3, 0)
    assert house.client.get("/health").json()["engines"]["tuneyard/big"]["running"] == 0


def test_a_line_of_a_stream_may_be_long(house: House):
    events = house.stream("long", max_tokens=3)

    assert [len(event["choices"][0]["delta"]["content"]) for event in events[1:]] == [300_000] * 3


def test_what_is_used_is_booked_once_per_request(house: House):
    house.ask("two words", n=2)
    house.stream("two words", n=2)
    house.refused("refuse")

    assert house.booked == {"requests": 3, "prompt_tokens": 4, "completion_tokens": 20}


def test_a_service_in_front_of_vllm_alone_needs_no_torch():
    code = "import sys, tuneyard_host.inference.service, tuneyard_host.inference.vllm.server as _; print('torch' in sys.modules)"

    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "False\n"
    )


def test_answers_of_a_vllm_before_nested_errors_are_read_too():
    old = json.dumps({"object": "error", "message": "no such thing", "type": "NotFoundError", "code": 404})

    assert str(wire.error(404, old)) == "no such thing"
    assert str(wire.error(500, b"<html>")).startswith("The inference engine failed")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("Invalid JSON grammar specification.", "response_format"),
        ("Invalid grammar specification.", "response_format"),
        ("Something else.", None),
    ],
)
def test_a_form_that_vllm_cannot_compile_is_refused_by_its_option(message: str, param: str | None):
    told = json.dumps({"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}})

    found = wire.error(400, told)

    assert (found.status, found.param, str(found)) == (422, param, message)


def test_top_logprobs_go_only_with_logprobs():
    chat = ChatRequest(model="m", messages=[{"role": "user", "content": "?"}], top_logprobs=0)

    assert "top_logprobs" not in wire.request_body(chat, BASE)
