"""Tokens: a generated turn is what the rollout recorded, and the template writes only what stands around it."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest

from training_fixtures import base, choice, one_thread, said, user  # noqa: F401
from tuneyard import trajectories
from tuneyard.errors import TrainingError
from tuneyard_host.bases import Base
from tuneyard_host.training.packing import History
from tuneyard_host.training.templates import Template
from tuneyard_host.training.tokens import tokenize, tokenize_example

QWEN3 = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or message.role == 'system' %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}
{%- set thought = '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

LLAMA3 = """\
{{- '<|begin|>' }}
{%- for message in messages %}
{%- if 'tool_calls' in message %}
{{- '<|start|>assistant<|end|>\\n\\n{"name": "' + message.tool_calls[0].function.name + '"}<|eot|>' }}
{%- else %}
{{- '<|start|>' + message.role + '<|end|>\\n\\n' + message.content | trim + '<|eot|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}"""

STRICT = """\
{%- set ns = namespace(turn=0) %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{%- endif %}
{%- set ns.turn = ns.turn + 1 %}
{%- endif %}
{%- if message.role == 'user' %}{{- '[INST] ' + message.content + ' [/INST]' }}
{%- elif message.tool_calls %}{{- '[CALL] ' + message.tool_calls[0].function.name + '<|eot|>' }}
{%- elif message.role == 'tool' %}{{- '[RESULT] ' + message.content + ' [/RESULT]' }}
{%- else %}{{- ' ' + message.content + '<|eot|>' }}{%- endif %}
{%- endfor %}"""


@pytest.fixture(scope="module")
def llama(base: Base) -> Base:
    """A tokenizer that ends turns as Llama does."""
    return dressed(base, LLAMA3)


def dressed(base: Base, template: str) -> Base:
    """The base with another chat template, and the special tokens of all of them."""
    tokenizer = copy.deepcopy(base.tokenizer)
    tokenizer.chat_template = template
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|begin|>", "<|start|>", "<|end|>", "<|eot|>", "<|eom|>"]}
    )
    config = copy.deepcopy(base.model.config)
    config.vocab_size = 4096
    model: Any = SimpleNamespace(config=config, generation_config=None)
    if template != QWEN3:
        config.eos_token_id = tokenizer.convert_tokens_to_ids(["<|eot|>", "<|eom|>"])
    return Base(base.spec, model, tokenizer, base.context_length, "")


def made(base: Base, *items: dict[str, Any], plain: bool = False, tools: Any = None) -> History:
    """The tokens of a conversation that has something to train on."""
    found = tokenize(
        trajectories.History(messages_and_choices=list(items), tools=tools),
        Template(base),
        without_logprobs=plain,
    )
    assert found is not None
    assert len(found.ids) == len(found.trained) == len(found.logprobs)
    return found


def text(base: Base, history: History) -> str:
    """What the tokens say."""
    return str(base.tokenizer.decode(history.ids))


def trained(base: Base, history: History) -> list[str]:
    """What each run of trained tokens says."""
    runs: list[list[int]] = []
    for at, token in enumerate(history.ids):
        if history.trained[at]:
            if not history.trained[at - 1]:
                runs.append([])
            runs[-1].append(token)
    return [str(base.tokenizer.decode(run)) for run in runs]


def spelled(base: Base, words: str) -> list[int]:
    """Text in the most tokens there are: one for each character, as no tokenizer would write it."""
    return [token for letter in words for token in base.tokenizer.encode(letter, add_special_tokens=False)]


def test_generated_tokens_are_kept_as_they_were_sampled(base: Base):
    ids = [*spelled(base, "maybe"), base.tokenizer.eos_token_id]

    history = made(base, user("Answer."), choice(ids, text="maybe"))

    assert history.ids[-len(ids) :] == ids
    assert history.trained == [False] * (len(history.ids) - len(ids)) + [True] * len(ids)
    assert history.logprobs[-len(ids) :] == [-1.0] * len(ids)
    assert (
        text(base, history) == "<|im_start|>user\nAnswer.<|im_end|>\n<|im_start|>assistant\nmaybe<|im_end|>"
    )


def test_several_turns_stand_in_the_text_of_the_template(base: Base):
    history = made(
        base,
        {"role": "system", "content": "Be brief."},
        user("One?"),
        said(base, "one"),
        user("Two?"),
        {"role": "assistant", "content": "two"},
        user("Three?"),
        said(base, "three"),
        user("Thanks."),
    )

    assert text(base, history) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n"
        "<|im_start|>assistant\none<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"
        "<|im_start|>user\nThree?<|im_end|>\n<|im_start|>assistant\nthree<|im_end|>"
    )
    assert trained(base, history) == ["one<|im_end|>", "three<|im_end|>"]


def test_a_choice_that_was_cut_by_length_gets_its_end_from_the_template(base: Base):
    cut = choice(spelled(base, "on and"), text="on and")

    history = made(base, user("a"), cut, user("b"), said(base, "c"))

    assert "assistant\non and<|im_end|>\n<|im_start|>user\nb<|im_end|>" in text(base, history)
    assert trained(base, history) == ["on and", "c<|im_end|>"]


def test_a_tool_call_keeps_the_tokens_it_was_made_of(base: Base):
    words = '<tool_call>\n{"name":"add",  "arguments":{"a":1}}\n</tool_call>'
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]

    history = made(
        base,
        user("Add."),
        choice([*spelled(base, words), base.tokenizer.eos_token_id], text="", calls=calls),
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        said(base, "three"),
        tools=tools,
    )

    assert trained(base, history) == [words + "<|im_end|>", "three<|im_end|>"]
    assert '"name": "add"' in text(base, history).split("<|im_end|>")[0]
    assert (
        f"assistant\n{words}<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\nthree"
        in text(base, history)
    )


def test_the_prompt_is_what_the_template_writes_for_it(base: Base):
    messages = [{"role": "system", "content": "s"}, user("u")]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

    history = made(base, *messages, said(base, "x"), tools=tools)

    prompt = base.tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_dict=False
    )
    assert history.ids[: len(prompt)] == prompt


def test_a_history_without_generated_tokens_teaches_nothing(base: Base):
    items = [user("a"), {"role": "assistant", "content": "b"}, {"index": 0, "message": {"content": "c"}}]

    template, history = Template(base), trajectories.History(messages_and_choices=items)

    assert tokenize(history, template, without_logprobs=False) is None
    assert tokenize(trajectories.History(messages_and_choices=[]), template, without_logprobs=True) is None


def test_plain_answers_train_where_that_is_allowed(base: Base):
    unrecorded = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "two"}}
    items = [
        user("a"),
        {"role": "assistant", "content": "one"},
        user("b"),
        unrecorded,
        user("c"),
        said(base, "three"),
    ]

    history = made(base, *items, plain=True)

    assert trained(base, history) == ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]
    known = [value for value, trains in zip(history.logprobs, history.trained, strict=True) if trains]
    assert sum(math.isnan(value) for value in known) == len(known) - len(items[-1]["token_ids"])


def test_tokens_without_logprobs_are_kept_and_train_only_where_that_is_allowed(base: Base):
    bare = said(base, "one") | {"logprobs": None}
    items = [user("a"), bare, user("b"), said(base, "two")]

    assert trained(base, made(base, *items)) == ["two<|im_end|>"]
    assert trained(base, made(base, *items, plain=True)) == ["one<|im_end|>", "two<|im_end|>"]
    assert made(base, *items).ids == made(base, *items, plain=True).ids


@pytest.mark.parametrize(
    "spelling", ["token_ids", "model_extra", "token_id:n", "bytes", "text", "vocabulary"]
)
def test_tokens_are_found_however_the_server_recorded_them(base: Base, spelling: str):
    words = " maybe not" if spelling == "text" else " maybe né"
    ids = [*base.tokenizer.encode(words, add_special_tokens=False), base.tokenizer.eos_token_id]
    told = choice(ids)
    told.pop("token_ids")
    for entry, token in zip(told["logprobs"]["content"], ids, strict=True):
        spelt = base.tokenizer.convert_ids_to_tokens(token)
        raw = next(key for key, value in Template(base).vocabulary.items() if value == token)
        if spelling == "bytes":
            entry |= {"token": "?", "bytes": list(raw)}
        elif spelling == "text":
            entry |= {"token": raw.decode()}
        elif spelling == "vocabulary":
            entry |= {"token": spelt}
        elif spelling != "token_id:n":
            entry |= {"token": "?"}
    if spelling == "token_ids":
        told["token_ids"] = ids
    elif spelling == "model_extra":
        told["model_extra"] = {"token_ids": ids}

    history = made(base, user("a"), told)

    assert history.ids[-len(ids) :] == ids


def test_a_token_that_nobody_knows_is_refused_with_what_to_do(base: Base):
    told = choice([5])
    told.pop("token_ids")
    told["logprobs"]["content"][0]["token"] = "Antidisestablishmentarianism"

    with pytest.raises(TrainingError, match="return_token_ids"):
        made(base, user("a"), told)


def test_an_end_of_turn_that_has_no_logprob_counts_as_unknown(base: Base):
    told = said(base, "yes")
    told["logprobs"]["content"].pop()

    history = made(base, user("a"), told)

    assert history.trained[-1] and math.isnan(history.logprobs[-1])


def test_token_ids_and_logprobs_of_different_rollouts_are_refused(base: Base):
    told = said(base, "yes and no")
    del told["logprobs"]["content"][:2]

    with pytest.raises(TrainingError, match="they must be of one rollout"):
        made(base, user("a"), told)


@pytest.mark.parametrize("value", [None, -9999.0, float("-inf"), float("nan")])
def test_a_logprob_that_is_no_number_counts_as_unknown(base: Base, value: Any):
    told = said(base, "yes")
    told["logprobs"]["content"][0]["logprob"] = value

    history = made(base, user("a"), told)

    assert math.isnan(
        next(known for known, trains in zip(history.logprobs, history.trained, strict=True) if trains)
    )


def test_images_are_refused_in_words(base: Base):
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}

    with pytest.raises(TrainingError, match="must be text"):
        made(base, picture, said(base, "a cat"))


def test_text_parts_are_one_text(base: Base):
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}

    assert made(base, parts, said(base, "x")).ids == made(base, user("ab"), said(base, "x")).ids


def test_thoughts_stay_where_a_template_would_drop_or_add_them(base: Base):
    qwen = dressed(base, QWEN3)
    thought = said(qwen, "<think>\nhm\n</think>\n\none")

    history = made(qwen, user("a"), thought, user("b"), said(qwen, "<think>\nso\n</think>\n\ntwo"))

    assert text(qwen, history) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\none<|im_end|>\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n<think>\nso\n</think>\n\ntwo<|im_end|>"
    )
    assert trained(qwen, history) == [
        "<think>\nhm\n</think>\n\none<|im_end|>",
        "<think>\nso\n</think>\n\ntwo<|im_end|>",
    ]


def test_an_answer_without_thoughts_follows_the_prompt_that_forbids_them(base: Base):
    qwen = dressed(base, QWEN3)

    history = made(qwen, user("a"), said(qwen, "one"), user("b"), said(qwen, "two"))

    assert text(qwen, history) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\none<|im_end|>\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\ntwo<|im_end|>"
    )
    assert trained(qwen, history) == ["one<|im_end|>", "two<|im_end|>"]


def test_a_template_that_trims_and_begins_with_a_token_of_its_own(llama: Base):
    eot, eom = llama.tokenizer.convert_tokens_to_ids(["<|eot|>", "<|eom|>"])
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]

    history = made(
        llama,
        user(" a "),
        choice([*spelled(llama, " f() "), eom], calls=calls),
        {"role": "tool", "content": "r"},
        choice([*spelled(llama, " b "), eot]),
        user("c"),
        choice(spelled(llama, "d")),
    )

    head = "<|start|>assistant<|end|>\n\n"
    assert text(llama, history) == (
        f"<|begin|><|start|>user<|end|>\n\na<|eot|>{head} f() <|eom|><|start|>tool<|end|>\n\nr<|eot|>{head} b <|eot|>"
        f"<|start|>user<|end|>\n\nc<|eot|>{head}d"
    )
    assert trained(llama, history) == [" f() <|eom|>", " b <|eot|>", "d"]


def test_a_template_that_insists_on_the_tool_call_gets_it(base: Base):
    strict = dressed(base, STRICT)
    eot = strict.tokenizer.convert_tokens_to_ids("<|eot|>")
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]

    history = made(
        strict,
        user("a"),
        choice([*spelled(strict, "[CALL]  f"), eot], calls=calls),
        {"role": "tool", "content": "r"},
        choice([*spelled(strict, " b"), eot]),
    )

    assert text(strict, history) == "[INST] a [/INST][CALL]  f<|eot|>[RESULT] r [/RESULT] b<|eot|>"


def test_a_conversation_that_the_template_refuses_fails_in_its_words(base: Base):
    strict = dressed(base, STRICT)

    with pytest.raises(TrainingError, match="roles must alternate"):
        made(strict, user("a"), user("b"), said(strict, "c"))


CONVERSATION = [
    {"role": "system", "content": "Be kind."},
    user("One?"),
    {"role": "assistant", "content": "one"},
    user("Add."),
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}],
    },
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "It is two."},
]


def test_an_example_trains_what_the_templates_own_marks_say(base: Base):
    history = tokenize_example(CONVERSATION, None, Template(base))

    marked = base.tokenizer.apply_chat_template(
        CONVERSATION, return_dict=True, return_assistant_tokens_mask=True
    )
    assert history.ids == marked["input_ids"]
    assert history.trained == [bool(mark) for mark in marked["assistant_masks"]]


def test_only_the_last_turn_of_an_example_trains_where_that_is_asked(base: Base):
    history = tokenize_example(CONVERSATION, None, Template(base), last_only=True)

    assert trained(base, history) == ["It is two.<|im_end|>"]


def test_a_template_without_marks_trains_the_same_turns(base: Base):
    qwen, llama = dressed(base, QWEN3), dressed(base, LLAMA3)
    call = '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'

    assert trained(llama, tokenize_example(CONVERSATION, None, Template(llama))) == [
        "one<|eot|>",
        '{"name": "add"}<|eot|>',
        "It is two.<|eot|>",
    ]
    assert trained(qwen, tokenize_example(CONVERSATION, None, Template(qwen))) == [
        "one<|im_end|>",
        call,
        "<think>\n\n</think>\n\nIt is two.<|im_end|>",
    ]


def test_a_template_that_drops_old_thoughts_still_shows_where_turns_are(base: Base):
    qwen = dressed(base, QWEN3)
    thinking = [
        user("a"),
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\none"},
        user("b"),
        {"role": "assistant", "content": "<think>\nso\n</think>\n\ntwo"},
    ]

    history = tokenize_example(thinking, None, Template(qwen))

    assert trained(qwen, history) == ["one<|im_end|>", "<think>\nso\n</think>\n\ntwo<|im_end|>"]
