"""A downloaded checkpoint is a plain PEFT adapter, and the service answers with exactly it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

pytestmark = pytest.mark.live
ASK = [{"role": "user", "content": "Answer yes, no or maybe."}]


@pytest.fixture(scope="module")
def http(stack: Any) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {stack.api_key}"}
    with httpx.Client(base_url=stack.base_url, headers=headers, timeout=60) as client:
        yield client


def test_peft_loads_a_checkpoint_and_gives_the_services_log_probabilities(http: httpx.Client, tmp_path: Path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from tuneyard_host import bases

    body = {"project": "judges", "name": uuid.uuid4().hex, "base_model": "tuneyard/tiny"}
    model = http.post("/v1/preview/models", json=body).json()
    train(http, model)
    checkpoint = http.get(f"/v1/preview/models/{model['id']}/checkpoints/1").json()
    for file in checkpoint["files"]:
        (tmp_path / file["name"]).write_bytes(httpx.get(file["url"]).content)
    base = AutoModelForCausalLM.from_pretrained(bases.BUILT_IN["builtin:tiny"], dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, tmp_path).eval()

    request = {"messages": ASK, "max_tokens": 8, "temperature": 0, "return_token_ids": True, "logprobs": True}
    answers = {
        name: http.post("/v1/chat/completions", json=request | {"model": name}).json()
        for name in (f"{model['inference_name']}:step1", "tuneyard/tiny")
    }

    trained, plain = (logprobs(adapted, answer) for answer in answers.values())
    told = [told_logprobs(answer) for answer in answers.values()]
    assert torch.allclose(trained, told[0], atol=1e-4)
    assert not torch.allclose(plain, told[1], atol=1e-2)
    with adapted.disable_adapter():
        assert torch.allclose(logprobs(adapted, answers["tuneyard/tiny"]), told[1], atol=1e-4)


def train(http: httpx.Client, model: dict[str, Any]) -> None:
    """One RL job that makes one answer likelier than the base model finds it."""
    request = {"model": model["inference_name"], "messages": ASK, "n": 16, "max_tokens": 8, "seed": 1}
    choices = http.post("/v1/chat/completions", json=request).json()["choices"]
    trajectories = [
        {"messages_and_choices": [*ASK, choice], "reward": float(choice["message"]["content"] == "maybe")}
        for choice in choices
    ]
    body = {"model_id": model["id"], "trajectory_groups": [{"trajectories": trajectories}]}
    job = http.post(
        "/v1/preview/training-jobs", json=body | {"experimental_config": {"learning_rate": 0.02}}
    ).json()
    while (seen := http.get(f"/v1/preview/training-jobs/{job['id']}").json())["status"] in (
        "queued",
        "running",
    ):
        time.sleep(0.1)
    assert seen["status"] == "succeeded", seen


@torch.no_grad()
def logprobs(model: Any, answer: dict[str, Any]) -> torch.Tensor:
    """What a model gives the tokens of an answer."""
    prompt, ids = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).squeeze(1)


def told_logprobs(answer: dict[str, Any]) -> torch.Tensor:
    return torch.tensor([token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]])
