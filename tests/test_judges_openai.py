"""The unmodified openai SDK against the live local stack."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

pytestmark = pytest.mark.live
ASK = [{"role": "user", "content": "Answer yes, no or maybe."}]


@pytest.fixture(scope="module")
def client(stack: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(api_key=stack.api_key, base_url=stack.inference_url, max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def trained(stack: Any) -> str:
    """A trained model's name, before its first job."""
    name = f"chat-{uuid.uuid4().hex[:8]}"
    body = {"project": "judges", "name": name, "base_model": "tuneyard/tiny"}
    headers = {"Authorization": f"Bearer {stack.api_key}"}
    httpx.post(f"{stack.base_url}/v1/preview/models", json=body, headers=headers).raise_for_status()
    return f"wandb-artifact:///{stack.team}/judges/{name}"


def test_it_chats_with_a_base_model(client: openai.OpenAI):
    answer = client.chat.completions.create(model="tuneyard/tiny", messages=ASK, max_tokens=8)

    assert answer.object == "chat.completion" and answer.model == "tuneyard/tiny"
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.choices[0].logprobs is None


def test_a_trained_models_answer_carries_what_training_needs(client: openai.OpenAI, trained: str):
    answer = client.chat.completions.create(model=trained, messages=ASK, max_tokens=8, n=3)

    assert len(answer.choices) == 3
    for choice in answer.choices:
        ids = [int(token.token.removeprefix("token_id:")) for token in choice.logprobs.content]
        assert ids == choice.model_extra["token_ids"]
        assert all(token.logprob <= 0 for token in choice.logprobs.content)


def test_it_streams_with_usage_and_the_pieces_are_the_answer(client: openai.OpenAI):
    settings: dict[str, Any] = {"model": "tuneyard/tiny", "messages": ASK, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**settings)

    chunks = list(
        client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True})
    )

    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert {c.id for c in chunks} == {chunks[0].id}


def test_it_lists_base_and_trained_models(client: openai.OpenAI, trained: str):
    listed = {model.id: model for model in client.models.list()}

    assert {"tuneyard/tiny", trained} <= set(listed)
    assert listed[trained].model_extra["root"] == "tuneyard/tiny"


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"model": "nothing"}, openai.NotFoundError, "nothing"),
        ({"model": "tuneyard/tiny:step9"}, openai.NotFoundError, "tuneyard/tiny:step9"),
        ({"messages": []}, openai.UnprocessableEntityError, "messages"),
        ({"temperature": 3}, openai.UnprocessableEntityError, "temperature"),
        ({"n": 1000}, openai.UnprocessableEntityError, "n"),
        ({"max_tokens": 0}, openai.UnprocessableEntityError, "max_tokens"),
        ({"messages": [{"role": "pirate", "content": "arr"}]}, openai.UnprocessableEntityError, "role"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, openai.BadRequestError, "context"),
    ],
)
def test_it_gets_its_own_exception_types(
    client: openai.OpenAI, change: dict[str, Any], error: Any, says: str
):
    with pytest.raises(error, match=says):
        client.chat.completions.create(**({"model": "tuneyard/tiny", "messages": ASK} | change))


def test_a_wrong_key_is_an_authentication_error(stack: Any):
    stranger = openai.OpenAI(api_key="nope", base_url=stack.inference_url)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_a_client_that_leaves_in_mid_stream_harms_nobody(client: openai.OpenAI):
    for _ in range(3):
        with client.chat.completions.create(
            model="tuneyard/tiny", messages=ASK, stream=True, max_tokens=500, extra_body={"ignore_eos": True}
        ) as stream:
            next(iter(stream))

    assert client.chat.completions.create(model="tuneyard/tiny", messages=ASK, max_tokens=4).choices


def test_what_was_used_is_booked_also_for_a_stream_that_broke_off(client: openai.OpenAI, stack: Any):
    project = f"{stack.team}/{uuid.uuid4().hex}"
    booked = client.with_options(default_headers={"Compat-Project": project})
    whole = booked.chat.completions.create(model="tuneyard/tiny", messages=ASK, max_tokens=4)
    with booked.chat.completions.create(
        model="tuneyard/tiny", messages=ASK, stream=True, max_tokens=500, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))

    for _ in range(100):
        rows = httpx.get(
            f"{stack.inference_url}/usage",
            headers={"Authorization": f"Bearer {stack.api_key}"},
            params={"limit": 100},
        ).json()["data"]
        mine = [row for row in rows if f"{stack.team}/{row['project']}" == project]
        if mine and mine[0]["requests"] == 2:
            break
        time.sleep(0.1)
    (line,) = mine
    assert line["prompt_tokens"] == 2 * whole.usage.prompt_tokens
    assert whole.usage.completion_tokens < line["completion_tokens"] < 500


def test_usage_may_be_booked_on_the_own_team_only(client: openai.OpenAI, stack: Any):
    mine = client.with_options(default_headers={"Compat-Project": f"{stack.team}/evals"})
    theirs = client.with_options(default_headers={"Compat-Project": "somebody/evals"})

    assert mine.chat.completions.create(model="tuneyard/tiny", messages=ASK, max_tokens=2).choices
    with pytest.raises(openai.PermissionDeniedError, match="somebody"):
        theirs.chat.completions.create(model="tuneyard/tiny", messages=ASK, max_tokens=2)
