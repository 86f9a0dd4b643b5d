"""A vLLM server of one's own behind the door, against the embedded engine on the same weights.

Skipped unless TUNEYARD_VLLM_URL names a server that was started as docs/aws.md says, TUNEYARD_VLLM_API_KEY its key and
TUNEYARD_VLLM_SOURCE the folder or hub id of its base model, small enough to be trained here.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from conftest import Stack, running

URL = os.environ.get("TUNEYARD_VLLM_URL")
pytestmark = pytest.mark.skipif(URL is None, reason="TUNEYARD_VLLM_URL names no vLLM server")

ASK: Any = [{"role": "user", "content": "Answer yes, no or maybe."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
COLOUR = {"type": "string", "enum": ["red", "blue"]}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack that serves the same weights by the vLLM server and by itself."""
    source, adapters = os.environ["TUNEYARD_VLLM_SOURCE"], tmp_path_factory.mktemp("adapters")
    served = f"served/base={source},learning_rate=0.003,engine_url={URL},engine_folder={adapters}"
    own = f"own/base={source},learning_rate=0.003"
    state = tmp_path_factory.mktemp("vllm") / "state"
    with running(state, "--base-model", served, "--base-model", own) as stack:
        yield stack


@pytest.fixture(scope="module")
def sdk(both: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=both.inference_url, api_key=both.api_key, max_retries=0)


@pytest.fixture(scope="module")
def api(both: Stack) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {both.api_key}"}
    with httpx.Client(base_url=both.base_url, headers=headers, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def trained(api: httpx.Client) -> dict[str, dict[str, Any]]:
    """A model of each base, trained by the same two jobs."""
    return {base: made(api, base) for base in ("served", "own")}


def made(api: httpx.Client, base: str) -> dict[str, Any]:
    body = {"project": "p", "name": base, "base_model": f"{base}/base"}
    model: dict[str, Any] = api.post("/v1/preview/models", json=body).raise_for_status().json()
    group = [
        {"messages_and_choices": [*ASK, {"role": "assistant", "content": word}], "reward": reward}
        for word, reward in (("yes", 0.0), ("no", 0.5), ("maybe", 1.0))
    ]
    for _ in range(2):
        job = {"model_id": model["id"], "trajectory_groups": [{"trajectories": group}]}
        job["experimental_config"] = {"allow_training_without_logprobs": True}
        id = api.post("/v1/preview/training-jobs", json=job).raise_for_status().json()["id"]
        while (status := api.get(f"/v1/preview/training-jobs/{id}").json()["status"]) != "succeeded":
            assert status != "failed"
            time.sleep(0.2)
    return model


def said(sdk: openai.OpenAI, model: str) -> list[tuple[str, float]]:
    """The tokens of a greedy answer with their log probabilities."""
    answer = sdk.chat.completions.create(
        model=model, messages=ASK, max_tokens=6, temperature=0, logprobs=True
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content
    return [(token.token, token.logprob) for token in logprobs.content]


def name_of(model: dict[str, Any], alias: str = "latest") -> str:
    return f"wandb-artifact:///{model['entity']}/p/{model['name']}:{alias}"


def agree(ours: list[tuple[str, float]], theirs: list[tuple[str, float]]) -> bool:
    return [t for t, _ in ours] == [t for t, _ in theirs] and all(
        abs(a - b) < 0.02 for (_, a), (_, b) in zip(ours, theirs, strict=True)
    )


def test_base_and_checkpoints_answer_as_the_embedded_engine_does(
    sdk: openai.OpenAI, trained: dict[str, dict[str, Any]]
):
    assert agree(said(sdk, "served/base"), said(sdk, "own/base"))
    for alias in ("step1", "latest"):
        served, own = (said(sdk, name_of(trained[base], alias)) for base in ("served", "own"))
        assert agree(served, own) and not agree(served, said(sdk, "served/base"))


def test_a_stream_says_what_the_whole_answer_says_and_counts_it(
    sdk: openai.OpenAI, trained: dict[str, dict[str, Any]]
):
    asked: Any = {"model": name_of(trained["served"]), "messages": ASK, "max_tokens": 8, "temperature": 0}
    whole = sdk.chat.completions.create(**asked)

    chunks = list(sdk.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and chunks[-1].usage == whole.usage
    assert getattr(whole.choices[0], "token_ids", None)


def test_tools_and_schemas_bind(sdk: openai.OpenAI):
    asked: Any = {"model": "served/base", "max_tokens": 80, "temperature": 0}
    question: Any = [{"role": "user", "content": "What is the weather in Rome?"}]

    called = sdk.chat.completions.create(
        **asked, messages=question, tools=[WEATHER], tool_choice="required"
    ).choices[0]
    shaped = sdk.chat.completions.create(
        **asked,
        messages=ASK,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "a", "strict": True, "schema": COLOUR},
        },
    ).choices[0]

    assert called.finish_reason == "tool_calls" and called.message.tool_calls
    assert isinstance(json.loads(called.message.tool_calls[0].function.arguments)["city"], str)  # type: ignore[union-attr]
    assert json.loads(shaped.message.content or "") in COLOUR["enum"]


@pytest.mark.parametrize(
    ("more", "status", "param"),
    [
        ({"messages": [{"role": "user", "content": "word " * 20_000}]}, 400, "messages"),
        ({"temperature": -1}, 422, "temperature"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "x"}},
                }
            },
            422,
            "response_format",
        ),
    ],
)
def test_what_vllm_refuses_is_told_in_our_form(
    sdk: openai.OpenAI, more: dict[str, Any], status: int, param: str
):
    with pytest.raises(openai.APIStatusError) as refused:
        sdk.chat.completions.create(**{"model": "served/base", "messages": ASK, **more})

    assert (refused.value.status_code, refused.value.param) == (status, param)  # type: ignore[attr-defined]


def test_a_deleted_step_is_gone(sdk: openai.OpenAI, api: httpx.Client, trained: dict[str, dict[str, Any]]):
    model = trained["served"]
    said(sdk, name_of(model, "step1"))
    api.request(
        "DELETE", f"/v1/preview/models/{model['id']}/checkpoints", json={"steps": [1]}
    ).raise_for_status()

    with pytest.raises(openai.NotFoundError):
        said(sdk, name_of(model, "step1"))
    assert said(sdk, name_of(model))
