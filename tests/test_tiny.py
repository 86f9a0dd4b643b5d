"""The embedded base model: its files, its tokenizer and template, what it answers, and what its corpus leaves out."""

import hashlib
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuneyard_host.tiny import corpus, evaluate, phrases, sums, tools
from tuneyard_host.tiny.corpus import Conversation

FOLDER = Path(evaluate.__file__).parent / "model"
WEATHER = evaluate.KNOWN_TOOLS[0]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
EVERY_ROLE: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Weather in "}, {"type": "text", "text": "Oslo?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": '{"sky": "grey"}'},
    {"role": "function", "name": "get_wind", "content": "calm"},
    {"role": "assistant", "content": "The sky is grey."},
    {"role": "developer", "content": "Shout."},
    {"role": "user", "content": "Again?"},
    {"role": "assistant", "content": "GREY"},
]


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    return evaluate.model_in(FOLDER)


@pytest.fixture(scope="module")
def model(loaded):
    return loaded[0]


@pytest.fixture(scope="module")
def tokenizer(loaded):
    return loaded[1]


def test_the_shipped_files_have_their_digests():
    listed = dict(reversed(line.split()) for line in (FOLDER / "SHA256SUMS").read_text().splitlines())

    assert listed == {name: hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() for name in listed}
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= set(listed)


def test_the_shipped_template_is_the_one_in_the_source():
    assert (FOLDER / "chat_template.jinja").read_text() == (FOLDER.parent / "template.jinja").read_text()


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.text())
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_a_word_is_the_same_tokens_wherever_it_stands(tokenizer):
    word = tokenizer.encode("zanzibar", add_special_tokens=False)

    for sentence in ("the zanzibar", '{"city": "zanzibar"}', "\nzanzibar,", "get_zanzibar"):
        ids = tokenizer.encode(sentence, add_special_tokens=False)
        assert any(ids[start : start + len(word)] == word for start in range(len(ids)))


def test_every_role_is_in_the_prompt(tokenizer):
    text = tokenizer.apply_chat_template(EVERY_ROLE, tools=[WEATHER], tokenize=False)

    for part in (
        "<|im_start|>system\nBe brief.\n\n# Tools\n",
        json.dumps(WEATHER),
        "<|im_start|>user\nWeather in Oslo?<|im_end|>\n",
        f"<|im_start|>assistant\n{CALL}\n",
        '<|im_start|>tool\n{"sky": "grey"}<|im_end|>\n<|im_start|>tool\ncalm<|im_end|>\n',
        "<|im_start|>system\nShout.<|im_end|>\n",
    ):
        assert part in text


def test_the_mask_covers_every_answer_and_the_end_of_its_turn(tokenizer):
    encoded = tokenizer.apply_chat_template(
        EVERY_ROLE, tools=[WEATHER], return_dict=True, return_assistant_tokens_mask=True
    )

    trained = [i for i, on in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if on]

    assert tokenizer.decode(trained) == (CALL + "The sky is grey.<|im_end|>GREY<|im_end|>")


@pytest.mark.parametrize("arguments", ['{"city": "Oslo"}', {"city": "Oslo"}])
@pytest.mark.parametrize("content", [None, "", []])
def test_a_tool_call_is_written_the_same_however_it_is_given(tokenizer, arguments, content):
    call = {"function": {"name": "get_weather", "arguments": arguments}}
    message = {"role": "assistant", "content": content, "tool_calls": [call]}

    text = tokenizer.apply_chat_template([message], tokenize=False)

    assert text == f"<|im_start|>assistant\n{CALL}\n"


def test_tool_tags_survive_decoding_and_turn_marks_do_not(tokenizer):
    ids = tokenizer.encode("<tool_call>\n{}\n</tool_call><|im_end|>", add_special_tokens=False)

    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>\n{}\n</tool_call>"
    assert ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("answer", ["Oslo", "\nOslo", " Oslo\n", "<tool_call>", "7", ""])
def test_an_answer_is_the_same_tokens_in_the_transcript_as_after_the_prompt(tokenizer, answer):
    question = [phrases.user("Capital of Norway?")]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template([*question, phrases.assistant(answer)], return_dict=False)

    written = tokenizer.encode(answer + "<|im_end|>\n", add_special_tokens=False)

    assert whole == prompt + written


def test_a_begun_answer_can_be_continued(tokenizer):
    begun = [phrases.user("Count to 3"), phrases.assistant("1, 2")]

    text = tokenizer.apply_chat_template(begun, continue_final_message=True, tokenize=False)

    assert text.endswith("<|im_start|>assistant\n1, 2")


def test_the_model_answers_what_its_card_says_it_can(model, tokenizer):
    asked = {
        "Say: purple elephant": "purple elephant",
        "What is the capital of France?": "Paris",
        "12 + 30": "42",
    }
    questions = [Conversation("", corpus.turn(question, "")) for question in asked]

    assert evaluate.answers(model, tokenizer, questions) == [*asked.values()]


def test_the_model_calls_a_tool_it_has_never_seen(model, tokenizer):
    question = Conversation("", corpus.turn("What is the weather in Paris?", ""), [WEATHER])

    [answer] = evaluate.answers(model, tokenizer, [question])

    assert answer == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.mark.parametrize("prompt", evaluate.GUESSES[:3])
def test_the_model_guesses_evenly_so_that_a_reward_can_shift_it(model, tokenizer, prompt):
    found = evaluate.choices(model, tokenizer, prompt, count=200)

    assert all(0.15 < found[word] / 200 < 0.55 for word in ("yes", "no", "maybe"))
    assert sum(found[word] for word in ("yes", "no", "maybe")) > 190


def test_the_corpus_is_the_same_for_the_same_seed():
    first, again, other = (list(islice(corpus.conversations(seed), 300)) for seed in (1, 1, 2))

    assert first == again != other


def test_the_questions_of_the_evaluation_are_not_in_the_corpus():
    seen = list(islice(corpus.conversations(0), 5000))

    names = {tool["function"]["name"] for one in seen for tool in one.tools or []}
    assert not names & tools.HELD_OUT
    assert {tool["function"]["name"] for tool in evaluate.KNOWN_TOOLS} == tools.HELD_OUT
    said = {message["content"] for one in seen for message in one.messages}
    assert not any(f"{a} + {b}" in said for a in range(100) for b in range(100) if sums.held_out(a, b))
