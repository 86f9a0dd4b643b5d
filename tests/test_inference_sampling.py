"""What the sampling options promise, seen from outside."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from inference_fixtures import House, base_folder, bucket, house  # noqa: F401
from tuneyard_host.inference.sampling import KNOBS, Sampling, draw, key

LONG = {"max_tokens": 32, "ignore_eos": True, "return_token_ids": True, "logprobs": True}


def tokens_of(answer: dict[str, Any], choice: int = 0) -> list[int]:
    tokens: list[int] = answer["choices"][choice]["token_ids"]
    return tokens


def test_a_seed_gives_the_same_answer_alone_and_in_any_company(house: House) -> None:
    asked = {"seed": 42, "temperature": 1.3, "top_p": 0.9, "adapter": "a2", **LONG}
    alone = house.ask("Hello", **asked)
    crowd: list[Any] = [
        (f"Company {i}", {"adapter": f"a{i % 8}", "max_tokens": 5 + i, "seed": i}) for i in range(20)
    ]

    in_company = house.ask_all([*crowd[:7], ("Hello", asked), *crowd[7:]])[7]

    assert tokens_of(in_company) == tokens_of(alone)


def test_without_a_seed_answers_differ(house: House) -> None:
    assert tokens_of(house.ask("Hello", **LONG)) != tokens_of(house.ask("Hello", **LONG))


def test_choices_of_one_seed_differ_from_each_other_and_are_repeatable(house: House) -> None:
    first, second = (house.ask("Hello", n=4, seed=7, **LONG) for _ in range(2))

    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
    assert len({tuple(tokens_of(first, i)) for i in range(4)}) == 4
    assert [tokens_of(first, i) for i in range(4)] == [tokens_of(second, i) for i in range(4)]
    assert first["usage"]["completion_tokens"] == 4 * 32


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -20.0]).repeat(40_000, 1)
    samplings = [Sampling(most=1, temperature=0.7, key=key(1, choice)) for choice in range(len(logits))]

    drawn = draw(logits, np.array([sampling.knobs() for sampling in samplings], KNOBS)).bincount(
        minlength=5
    ) / len(logits)

    assert torch.allclose(drawn, (logits[0] / 0.7).softmax(-1), atol=0.01)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0}),
        ({"top_p": 0.66}, {0, 1}),
        ({"min_p": 0.3}, {0, 1}),
        ({"top_k": 3, "top_p": 0.95}, {0, 1, 2}),
        ({"top_k": 1}, {0}),
    ],
)
def test_unlikely_tokens_are_cut_off(options: dict[str, Any], kept: set[int]) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).repeat(4000, 1)  # 0.64, 0.24, 0.09, 0.03
    samplings = [Sampling(most=1, key=key(2, choice), **options) for choice in range(len(logits))]

    drawn = draw(logits, np.array([sampling.knobs() for sampling in samplings], KNOBS))

    assert set(drawn.tolist()) == kept


def test_recorded_log_probabilities_do_not_depend_on_temperature_or_top_p(house: House) -> None:
    plain = house.ask("Hello", temperature=0, **LONG)
    bent = house.ask("Hello", temperature=0.1, top_k=1, logit_bias={}, **LONG)

    recorded = [[entry["logprob"] for entry in a["choices"][0]["logprobs"]["content"]] for a in (plain, bent)]
    assert tokens_of(plain) == tokens_of(bent)
    assert recorded[0] == pytest.approx(recorded[1], abs=1e-4)


def test_logit_bias_forces_and_forbids(house: House) -> None:
    forced = house.ask("Hello", logit_bias={"77": 100}, **LONG)
    forbidden = house.ask("Hello", logit_bias={"77": -100}, n=8, **LONG)

    assert set(tokens_of(forced)) == {77}
    assert not any(77 in tokens_of(forbidden, i) for i in range(8))


def test_only_allowed_tokens_are_drawn(house: House) -> None:
    answer = house.ask("Hello", allowed_token_ids=[70, 71, 72], **LONG)

    assert set(tokens_of(answer)) <= {70, 71, 72}


def test_penalties_spread_the_tokens(house: House) -> None:
    few = {"allowed_token_ids": [70, 71, 72, 73], "temperature": 0.3, "seed": 1, **LONG}

    spread = Counter(tokens_of(house.ask("Hello", frequency_penalty=2, **few)))
    assert max(Counter(tokens_of(house.ask("Hello", **few))).values()) > max(spread.values())
    assert set(spread) == {70, 71, 72, 73}
    distinct = len(set(tokens_of(house.ask("Hello", temperature=0, repetition_penalty=50, **LONG))))
    assert distinct == 32


def test_a_token_that_ends_the_turn_is_in_the_ids_and_not_in_the_text(house: House) -> None:
    end = house.base.tokenizer.eos_token_id
    answer = house.ask("Hello", logit_bias={str(end): 100}, logprobs=True, return_token_ids=True)

    choice = answer["choices"][0]
    assert choice["token_ids"] == [end]
    assert choice["message"]["content"] == ""
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["content"]) == 1


def test_min_tokens_holds_back_the_end(house: House) -> None:
    end = house.base.tokenizer.eos_token_id
    answer = house.ask(
        "Hello", logit_bias={str(end): 100}, min_tokens=5, max_tokens=20, return_token_ids=True
    )

    assert len(tokens_of(answer)) == 6
    assert tokens_of(answer)[-1] == end


def test_ignore_eos_goes_on_to_the_limit(house: House) -> None:
    end = house.base.tokenizer.eos_token_id
    answer = house.ask(
        "Hello", logit_bias={str(end): 100}, ignore_eos=True, max_tokens=9, return_token_ids=True
    )

    assert tokens_of(answer) == [end] * 9
    assert answer["choices"][0]["finish_reason"] == "length"


def test_stop_token_ids_end_the_turn(house: House) -> None:
    answer = house.ask("Hello", logit_bias={"77": 100}, stop_token_ids=[77], return_token_ids=True)

    choice = answer["choices"][0]
    assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == ([77], "stop", 77)
    assert choice["message"]["content"] == ""
