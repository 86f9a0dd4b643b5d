"""What people chat with, unmodified: the openai SDK's helpers, LiteLLM, and LangChain's ChatOpenAI."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

from conftest import Stack
from inference_fixtures import TOKEN, Door, House, base_folder, bucket, house  # noqa: F401
from tuneyard.completions import EngineRequest
from tuneyard_host.inference.meter import Meter
from tuneyard_host.inference.service import create_app

ASK: list[Any] = [{"role": "user", "content": "Answer yes, no or maybe."}]
live = pytest.mark.live


class Verdict(pydantic.BaseModel):
    """An answer with a form."""

    verdict: Literal["yes", "no", "maybe"]
    sure: bool


class GetWeather(pydantic.BaseModel):
    """The weather of a city."""

    city: Literal["Berlin", "Paris"]


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(api_key=stack.api_key, base_url=stack.inference_url, max_retries=0) as found:
        yield found


@live
def test_the_stream_helper_tells_the_story_and_ends_with_the_whole_answer(client: openai.OpenAI):
    kinds, text = [], ""
    with client.chat.completions.stream(
        model="tuneyard/tiny",
        messages=ASK,
        max_tokens=8,
        temperature=0,
        logprobs=True,
        stream_options={"include_usage": True},
    ) as stream:
        for event in stream:
            kinds.append(event.type)
            text += event.delta if event.type == "content.delta" else ""
        final = stream.get_final_completion()

    whole = client.chat.completions.create(model="tuneyard/tiny", messages=ASK, max_tokens=8, temperature=0)
    assert final.choices[0].message.content == text == whole.choices[0].message.content
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= set(kinds)
    assert final.usage.total_tokens == whole.usage.total_tokens
    assert len(final.choices[0].logprobs.content) == whole.usage.completion_tokens


@live
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_a_pydantic_answer_is_parsed(client: openai.OpenAI, streamed: bool):
    asked: dict[str, Any] = {"model": "tuneyard/tiny", "messages": ASK, "response_format": Verdict, "seed": 1}
    if streamed:
        with client.chat.completions.stream(**asked) as stream:
            answer = stream.get_final_completion()
    else:
        answer = client.chat.completions.parse(**asked)

    assert isinstance(answer.choices[0].message.parsed, Verdict)


@live
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_tools_are_called_answered_and_the_talk_goes_on(client: openai.OpenAI, streamed: bool):
    tool = openai.pydantic_function_tool(GetWeather)
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked: dict[str, Any] = {"model": "tuneyard/tiny", "messages": messages, "tools": [tool], "seed": 1}
    if streamed:
        with client.chat.completions.stream(**asked, tool_choice="required") as stream:
            first = stream.get_final_completion().choices[0]
    else:
        first = client.chat.completions.parse(**asked, tool_choice="required").choices[0]
    calls = first.message.tool_calls
    messages.append(first.message.model_dump(exclude={"parsed"}, exclude_none=True))
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "Sunny."} for call in calls]
    last = client.chat.completions.create(**asked, max_tokens=16)

    assert first.finish_reason == "tool_calls"
    assert all(isinstance(call.function.parsed_arguments, GetWeather) for call in calls)
    assert last.choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert last.usage.prompt_tokens > 20


@live
def test_the_raw_response_has_headers_and_parses_to_the_same(client: openai.OpenAI):
    raw = client.chat.completions.with_raw_response.create(model="tuneyard/tiny", messages=ASK, max_tokens=4)
    with client.chat.completions.with_streaming_response.create(
        model="tuneyard/tiny", messages=ASK, max_tokens=4, stream=True
    ) as streamed:
        lines = [line for line in streamed.iter_lines() if line]

    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().choices[0].message.content is not None
    assert streamed.headers["content-type"].startswith("text/event-stream") and lines[-1] == "data: [DONE]"


def test_over_the_limit_the_sdk_waits_as_it_is_told_and_gets_its_answer(house: House) -> None:
    meter = Meter(per_key=1, per_project=9)
    app = create_app([house.spec], lambda _: b"", TOKEN, meter=meter)
    limited = House(app, house.spec, house.bucket, [])
    other = EngineRequest.model_validate(limited.body())
    statuses: list[int] = []

    async def note(response: httpx.Response) -> None:
        statuses.append(response.status_code)
        if response.status_code == 429:
            meter.end(other, prompt_tokens=0, completion_tokens=0)

    async def ask() -> Any:
        http = httpx.AsyncClient(transport=Door(limited, None), event_hooks={"response": [note]})
        async with openai.AsyncOpenAI(
            api_key=TOKEN, base_url="http://engine/v1", http_client=http, max_retries=2
        ) as client:
            answer = await client.chat.completions.create(model="m", messages=ASK, max_tokens=2)
        await app.state.servers.close()
        return answer

    meter.begin(other)
    began = time.monotonic()
    answer = asyncio.run(ask())

    assert statuses == [429, 200] and time.monotonic() - began >= 1
    assert answer.choices[0].message is not None


@pytest.fixture(scope="module")
def litellm(stack: Stack) -> Iterator[Any]:
    """LiteLLM, kept from fetching its price list."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        import litellm as found

        yield found


@live
@pytest.mark.judges
@pytest.mark.filterwarnings("default")
def test_litellm_answers_streams_and_calls_tools(litellm: Any, stack: Stack):
    asked: dict[str, Any] = {
        "model": "openai/tuneyard/tiny", "api_base": stack.inference_url, "api_key": stack.api_key, "max_tokens": 8,
        "temperature": 0, "messages": ASK,
    }  # fmt: skip
    whole = litellm.completion(**asked, logprobs=True, top_logprobs=2)
    pieces = list(litellm.completion(**asked, stream=True))
    tool = openai.pydantic_function_tool(GetWeather)
    called = litellm.completion(**{**asked, "max_tokens": 60}, tools=[tool], tool_choice="required")

    text = whole.choices[0].message.content
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    (call, *_) = called.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Berlin", "Paris")
    with pytest.raises(litellm.exceptions.NotFoundError):
        litellm.completion(**asked | {"model": "openai/nothing"})
    with pytest.raises(litellm.exceptions.ContextWindowExceededError):
        litellm.completion(**asked | {"messages": [{"role": "user", "content": "word " * 5000}]})


@live
@pytest.mark.judges
@pytest.mark.filterwarnings("default")
def test_langchain_answers_streams_calls_tools_and_structures(stack: Stack, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        model="tuneyard/tiny",
        base_url=stack.inference_url,
        api_key=stack.api_key,
        temperature=0,
        max_tokens=60,
        max_retries=0,
    )
    whole = chat.invoke("Answer yes, no or maybe.")
    pieces = list(chat.stream("Answer yes, no or maybe."))
    called = chat.bind_tools([GetWeather], tool_choice="required").invoke("What is the weather in Paris?")
    shaped = chat.with_structured_output(Verdict, method="json_schema").invoke("Answer yes, no or maybe.")
    told = chat.bind(logprobs=True).invoke("Answer yes, no or maybe.")

    assert "".join(piece.text for piece in pieces) == whole.text
    assert whole.usage_metadata["output_tokens"] > 0
    assert called.tool_calls[0]["name"] == "GetWeather" and called.tool_calls[0]["args"]["city"] in (
        "Berlin",
        "Paris",
    )
    assert isinstance(shaped, Verdict)
    assert len(told.response_metadata["logprobs"]["content"]) == told.usage_metadata["output_tokens"]
    with pytest.raises(openai.NotFoundError):
        ChatOpenAI(model="nothing", base_url=stack.inference_url, api_key=stack.api_key).invoke("?")
