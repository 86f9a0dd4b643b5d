"""Text, stops, streams, tool calls and forms, as a client sees them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from inference_fixtures import House, base_folder, bucket, house  # noqa: F401

UMLAUTS = "Grüße aus Köln, 東京 and 🙂🙃!"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Köln", "東京"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}


def said(text: str) -> dict[str, Any]:
    """The options that make a model of random weights say exactly this."""
    return {"structured_outputs": {"choice": [text]}, "logprobs": True, "return_token_ids": True}


def stream(house: House, messages: Any = "Hello", **options: Any) -> list[Any]:
    """The chunks that the openai SDK reads."""
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    known = (
        "n",
        "seed",
        "stop",
        "tools",
        "tool_choice",
        "stream_options",
        "logprobs",
        "max_tokens",
        "temperature",
    )
    named = {name: options.pop(name) for name in known if name in options}

    async def read() -> list[Any]:
        async with house.openai() as client:
            answer = await client.chat.completions.create(
                model="m", messages=messages, stream=True, extra_body=options, **named
            )
            return [chunk async for chunk in answer]

    return asyncio.run(read())


def test_the_openai_sdk_reads_a_whole_answer(house: House) -> None:
    async def ask() -> Any:
        async with house.openai("a1") as client:
            return await client.chat.completions.create(
                model="wandb-artifact:///t/p/m:step3", messages=[{"role": "user", "content": "Hi"}], max_tokens=5,
                logprobs=True, top_logprobs=2, seed=1,
            )  # fmt: skip

    answer = asyncio.run(ask())

    assert answer.model == "wandb-artifact:///t/p/m:step3"
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    shown = entries[:-1] if answer.choices[0].finish_reason == "stop" else entries
    assert (
        b"".join(bytes(entry.bytes) for entry in shown).decode(errors="replace")
        == answer.choices[0].message.content
    )
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_adds_up_to_the_whole_answer(house: House, n: int) -> None:
    options = {
        "n": n,
        "seed": 5,
        "temperature": 1.4,
        "logprobs": True,
        "return_token_ids": True,
        "max_tokens": 40,
    }
    whole = house.ask("Tell me more", **options)

    chunks = stream(house, "Tell me more", stream_options={"include_usage": True}, **options)

    assert chunks[-1].choices == []
    usage = chunks[-1].usage.model_dump()
    assert {name: usage[name] for name in ("prompt_tokens", "completion_tokens")} == {
        name: whole["usage"][name] for name in ("prompt_tokens", "completion_tokens")
    }
    assert chunks[0].prompt_token_ids == whole["prompt_token_ids"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for choice in whole["choices"]:
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice["index"]]
        assert mine[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in mine) == choice["message"]["content"]
        assert [token for part in mine[1:] for token in part.token_ids] == choice["token_ids"]
        logprobs = [entry.logprob for part in mine if part.logprobs for entry in part.logprobs.content]
        assert logprobs == pytest.approx(
            [entry["logprob"] for entry in choice["logprobs"]["content"]], abs=1e-4
        )
        assert [part.finish_reason for part in mine if part.finish_reason] == [choice["finish_reason"]]


def test_characters_of_several_tokens_come_whole(house: House) -> None:
    chunks = stream(house, **said(UMLAUTS))

    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == UMLAUTS
    assert not any("\ufffd" in piece for piece in pieces)
    assert len([token for chunk in chunks[1:] for token in chunk.choices[0].token_ids]) > len(UMLAUTS)


def test_a_character_that_the_limit_cuts_shows_as_replaced(house: House) -> None:
    answer = house.ask(max_tokens=2, **said("🙂"))

    assert answer["choices"][0]["message"]["content"] == "\ufffd"
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stop", ["东京", "東京", "n, 東", "🙃", [" and ", "zzz"], "G"])
def test_a_stop_string_ends_the_text_before_it(house: House, stop: str | list[str]) -> None:
    stops = [stop] if isinstance(stop, str) else stop
    found = min((at for at in (UMLAUTS.find(s) for s in stops) if at >= 0), default=len(UMLAUTS))

    whole = house.ask(stop=stop, **said(UMLAUTS))["choices"][0]
    chunks = stream(house, stop=stop, **said(UMLAUTS))

    assert whole["message"]["content"] == UMLAUTS[:found]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == UMLAUTS[:found]
    assert whole["finish_reason"] == "stop"
    assert whole["stop_reason"] == (None if found == len(UMLAUTS) else next(s for s in stops if s in UMLAUTS))
    assert len(whole["token_ids"]) == len(whole["logprobs"]["content"])


def test_the_stop_string_stays_when_asked_for(house: House) -> None:
    answer = house.ask(stop="aus", include_stop_str_in_output=True, **said(UMLAUTS))

    assert answer["choices"][0]["message"]["content"] == "Grüße aus"


def test_tokens_are_rendered_as_ids_when_asked_for(house: House) -> None:
    choice = house.ask(return_tokens_as_token_ids=True, top_logprobs=1, **said("Hello"))["choices"][0]

    told = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert told == [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["content"][0]["top_logprobs"][0]["token"].startswith("token_id:")


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
ANSWERS = {
    "one call": (CALL, "", 1),
    "text before": ("Let me see.\n" + CALL, "Let me see.", 1),
    "two calls": (CALL + "\n" + CALL, "", 2),
    "no call": (" Just text < with a tag <tool ", " Just text < with a tag <tool ", 0),
    "broken JSON": ('A <tool_call>{"name": </tool_call> B', 'A <tool_call>{"name": </tool_call> B', 0),
    "cut off": ('<tool_call>{"name": "weather", "argu', '<tool_call>{"name": "weather", "argu', 0),
}


@pytest.mark.parametrize(("text", "content", "calls"), ANSWERS.values(), ids=ANSWERS)
def test_tool_calls_are_told_from_text(house: House, text: str, content: str, calls: int) -> None:
    whole = house.ask(tools=[WEATHER, TIME], **said(text))["choices"][0]
    chunks = [chunk.choices[0] for chunk in stream(house, tools=[WEATHER, TIME], **said(text))]

    found = whole["message"].get("tool_calls") or []
    assert (whole["message"]["content"] or "") == content
    assert [json.loads(call["function"]["arguments"]) for call in found] == [
        {"city": "Köln", "days": 2}
    ] * calls
    assert whole["finish_reason"] == chunks[-1].finish_reason == ("tool_calls" if calls else "stop")
    assert "".join(chunk.delta.content or "" for chunk in chunks) == content
    streamed = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert [call.index for call in streamed] == list(range(calls))
    assert [call.function.arguments for call in streamed] == [call["function"]["arguments"] for call in found]
    assert all(call.id and call.function.name == "weather" for call in streamed)
    written = b"".join(bytes(entry["bytes"]) for entry in whole["logprobs"]["content"])
    assert written.decode() == text + "<|im_end|>"


def test_without_parallel_tool_calls_there_is_one(house: House) -> None:
    answer = house.ask(tools=[WEATHER], parallel_tool_calls=False, **said(CALL + "\n" + CALL))

    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1


def test_tool_choice_none_hides_the_tools(house: House) -> None:
    hidden = house.ask(tools=[WEATHER], tool_choice="none", **said(CALL))

    assert hidden["prompt_token_ids"] == house.ask(**said(CALL))["prompt_token_ids"]
    assert hidden["choices"][0]["message"]["content"] == CALL
    assert len(house.ask(tools=[WEATHER], max_tokens=1, return_token_ids=True)["prompt_token_ids"]) > len(
        hidden["prompt_token_ids"]
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_required_tool_is_called_with_arguments_that_fit_its_schema(house: House, seed: int) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    choices = {"tool_choice": "required" if seed % 2 else named, "parallel_tool_calls": False}

    choice = house.ask(tools=[WEATHER], max_tokens=200, seed=seed, **choices)["choices"][0]

    (call,) = choice["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert choice["finish_reason"] == "tool_calls"
    assert call["function"]["name"] == "weather"
    assert arguments["city"] in ("Köln", "東京")
    assert 1 <= arguments["days"] <= 9


def test_a_json_schema_is_followed(house: House) -> None:
    schema = WEATHER["function"]["parameters"]
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}

    answers = house.ask_all(
        [("Hello", {"response_format": form, "seed": seed, "temperature": 2}) for seed in range(8)]
    )

    for answer in answers:
        read = json.loads(answer["choices"][0]["message"]["content"])
        assert set(read) == {"city", "days"}


def test_earlier_tool_calls_are_shown_to_the_model(house: House) -> None:
    function = {"name": "weather", "arguments": '{"city": "Bonn"}'}
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "Rain"},
    ]

    answer = house.ask(messages, max_tokens=1, return_token_ids=True)

    assert '"arguments": {"city": "Bonn"}' in house.base.tokenizer.decode(answer["prompt_token_ids"])


def test_a_message_can_be_continued(house: House) -> None:
    messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one two"}]

    answer = house.ask(messages, continue_final_message=True, max_tokens=1, return_token_ids=True)

    assert house.base.tokenizer.decode(answer["prompt_token_ids"]).endswith("assistant\none two")
