"""The engine's numbers are those of transformers and peft, whatever shares the batch."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config

from inference_fixtures import House, base_folder, bucket, house, save_base, served  # noqa: F401
from tuneyard.settings import BaseModelSpec
from tuneyard_host import bases

PROMPTS = [
    "Hello",
    "What is 2 + 2?",
    "Grüße aus Köln, 東京 and 🙂!",
    "def house(path):\n    return",
    "x" * 90,
]
ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: list[tuple[Any, dict[str, Any]]] = [
    (LlamaConfig, {"rope_parameters": ROPE, "attention_bias": True, "mlp_bias": True}),
    (Qwen2Config, {"tie_word_embeddings": True}),
    (MistralConfig, {"sliding_window": None}),
]


@pytest.fixture(scope="module")
def reference(house: House) -> Any:
    """The base model as transformers runs it, from its files."""
    return AutoModelForCausalLM.from_pretrained(house.spec.source).eval()


def logprobs_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """(T, V): for each position, the log-probabilities of the next token."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), -1)


def assert_same_numbers(answer: dict[str, Any], model: Any) -> None:
    """Every generated token's log-probability, and those of its alternatives, within 1e-4 (from -1 on: of its size) of the model's."""
    choice = answer["choices"][0]
    prompt, tokens = answer["prompt_token_ids"], choice["token_ids"]
    expected = logprobs_of(model, prompt + tokens)[len(prompt) - 1 :]
    for at, (token, entry) in enumerate(zip(tokens, choice["logprobs"]["content"], strict=True)):
        assert entry["logprob"] == pytest.approx(float(expected[at, token]), abs=1e-4, rel=1e-4)
        best = [other["logprob"] for other in entry["top_logprobs"]]
        assert best == pytest.approx(expected[at].topk(len(best)).values.tolist(), abs=1e-4, rel=1e-4)


def test_log_probabilities_are_those_of_transformers(house: House, reference: Any) -> None:
    options = {
        "logprobs": True,
        "top_logprobs": 5,
        "return_token_ids": True,
        "max_tokens": 40,
        "ignore_eos": True,
    }
    answers = house.ask_all([(text, options | {"temperature": 1.5, "seed": 1}) for text in PROMPTS])

    for answer in answers:
        assert_same_numbers(answer, reference)


def test_prompt_log_probabilities_are_those_of_transformers(house: House, reference: Any) -> None:
    answer = house.ask(PROMPTS[2], prompt_logprobs=3, return_token_ids=True, max_tokens=1)

    prompt = answer["prompt_token_ids"]
    expected = logprobs_of(reference, prompt)
    assert answer["prompt_logprobs"][0] is None
    for at, told in enumerate(answer["prompt_logprobs"][1:]):
        assert told[str(prompt[at + 1])]["logprob"] == pytest.approx(
            float(expected[at, prompt[at + 1]]), abs=1e-4, rel=1e-4
        )
        for token, entry in told.items():
            rank = int((expected[at] > expected[at, int(token)]).sum()) + 1
            assert entry["rank"] == rank


def test_greedy_answers_are_those_of_generate(house: House, reference: Any) -> None:
    options = {"temperature": 0, "max_tokens": 48, "return_token_ids": True}
    answers = house.ask_all([(text, options) for text in PROMPTS])

    for answer in answers:
        prompt = torch.tensor([answer["prompt_token_ids"]])
        with torch.no_grad():
            seen = torch.ones_like(prompt)
            expected = reference.generate(prompt, attention_mask=seen, do_sample=False, max_new_tokens=48)
        assert answer["choices"][0]["token_ids"] == expected[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize(
    "rows",
    [[2] * 9, [3, 5, 1, 0, 2, 1, 4, 1, 1], [2, 40, 7]],
    ids=["as many of each", "few and unequal", "many of one"],
)
def test_eight_adapters_and_the_base_in_one_batch_are_those_of_peft(house: House, rows: list[int]) -> None:
    """``rows``: how many requests name the base model, the first adapter, the second, ..."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft
    adapters = [None, *[f"a{i}" for i in range(8)]]
    names = [name for name, count in zip(adapters, rows, strict=False) for _ in range(count)]
    random.Random(1).shuffle(names)
    options = {
        "logprobs": True,
        "top_logprobs": 5,
        "return_token_ids": True,
        "max_tokens": 24,
        "ignore_eos": True,
    }

    answers = house.ask_all(
        [(f"Question {i}", options | {"adapter": name, "seed": i}) for i, name in enumerate(names)]
    )

    models = {}
    for name in set(names):
        models[name] = AutoModelForCausalLM.from_pretrained(house.spec.source).eval()
        if name is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                models[name] = peft.PeftModel.from_pretrained(models[name], str(house.bucket / name))
    for answer, name in zip(answers, names, strict=True):
        assert_same_numbers(answer, models[name])


def test_prompts_of_all_sizes_read_together_keep_their_own_numbers(house: House, reference: Any) -> None:
    """They share calls, padded to the longest; the second half begins where the rows of the first half are read."""
    texts = [f"{i} " + "several words " * (i % 7) for i in range(32)]
    options = {"logprobs": True, "top_logprobs": 3, "return_token_ids": True, "max_tokens": 3, "seed": 5}

    answers = house.ask_all([(text, options) for text in texts])
    answers += house.ask_all([(f"{text} and some more", options) for text in texts])

    assert len({len(answer["prompt_token_ids"]) for answer in answers}) > 6
    for answer in answers:
        assert_same_numbers(answer, reference)


def test_a_long_prompt_read_in_chunks_gives_the_same_numbers(house: House, reference: Any) -> None:
    text = "many words make a long prompt " * 16
    options = {"logprobs": True, "top_logprobs": 5, "return_token_ids": True, "max_tokens": 8, "seed": 3}

    answer = house.ask(text, **options)

    assert len(answer["prompt_token_ids"]) > 256
    assert_same_numbers(answer, reference)


def test_the_base_model_still_computes_the_same_after_the_engine_took_its_weights(
    house: House, reference: Any
) -> None:
    house.ask("Hello", max_tokens=1)

    expected = logprobs_of(reference, [5, 6, 7])
    assert torch.allclose(logprobs_of(house.base.model, [5, 6, 7]), expected, atol=1e-4)
    assert bases.load(house.spec).model is house.base.model


@pytest.mark.parametrize(("family", "settings"), FAMILIES, ids=lambda value: getattr(value, "model_type", ""))
def test_other_families_are_computed_as_transformers_does(
    tmp_path: Path, family: Any, settings: dict[str, Any]
) -> None:
    spec = BaseModelSpec(id="other", source=str(save_base(tmp_path, family, **settings)))
    with served(spec) as other:
        options = {
            "logprobs": True,
            "top_logprobs": 5,
            "return_token_ids": True,
            "max_tokens": 30,
            "ignore_eos": True,
        }
        answers = other.ask_all([(text, options) for text in PROMPTS])

    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for answer in answers:
        assert_same_numbers(answer, model)


def test_a_family_that_would_be_computed_wrongly_is_refused_with_the_reason(tmp_path: Path) -> None:
    spec = BaseModelSpec(id="other", source=str(save_base(tmp_path, MistralConfig, sliding_window=100)))
    with served(spec) as other:
        status, error = other.refused()

    assert status == 503
    assert "sliding window" in error["message"]
