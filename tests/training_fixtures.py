"""What the training tests share: the tiny base model, rollouts made by hand, and the slow twin of every computation."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tuneyard.configs import LORA_TARGETS, LoraSettings
from tuneyard.settings import BaseModelSpec
from tuneyard.trajectories import TrajectoryGroup
from tuneyard_host import bases
from tuneyard_host.bases import Base
from tuneyard_host.training.adapters import Learner, learner_for
from tuneyard_host.training.packing import History

LORA = LoraSettings(rank=4, alpha=4.0, seed=1)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """So that tests neither fight for the machine nor depend on it."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def base() -> Base:
    """The built-in model."""
    return bases.load(BaseModelSpec(id="tuneyard/tiny", source="builtin:tiny"))


@pytest.fixture(scope="session")
def files(base: Base, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """An adapter that changes something, made and saved by peft itself."""
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(3)
    settings = peft.LoraConfig(
        r=LORA.rank,
        lora_alpha=4,
        target_modules=list(LORA_TARGETS),
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    with quiet_peft():
        peft.get_peft_model(plain(base), settings).save_pretrained(folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def learner(base: Base, files: dict[str, bytes]) -> Learner:
    """A learner that holds that adapter."""
    found = learner_for(base, LORA)
    found.load(files, with_optimizer=False)
    return found


def twin(base: Base, files: dict[str, bytes], folder: Path) -> Any:
    """The same model and adapter as Hugging Face and peft compute them in float64, ready for gradients."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with quiet_peft():
        return peft.PeftModel.from_pretrained(plain(base), folder, is_trainable=True).eval().double()


def plain(base: Base) -> Any:
    """The base model as the library loads it."""
    model = AutoModelForCausalLM.from_pretrained(bases.folder(base.spec), dtype=torch.float32)
    model.eval()
    return model


@contextmanager
def quiet_peft() -> Iterator[None]:
    """peft 0.21 asks transformers 5.23 by a name that is going away."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def slow_logprobs(model: Any, history: History) -> tuple[Tensor, Tensor]:
    """log p and entropy of one history's trained tokens: alone in its batch, whole vocabulary, nothing shared."""
    distribution = model(input_ids=torch.tensor([history.ids])).logits[0].log_softmax(-1)
    trained = [place for place, trains in enumerate(history.trained) if trains]
    entropy = -(distribution.exp() * distribution).sum(-1)
    return (
        torch.stack([distribution[place - 1, history.ids[place]] for place in trained]),
        torch.stack([entropy[place - 1] for place in trained]).detach(),
    )


def slow_gradients(model: Any) -> dict[str, Tensor]:
    """The gradient of each LoRA matrix under its name in the files, and None left behind."""
    found = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    return found


def assert_equal_gradients(
    ours: dict[str, Tensor], slow: dict[str, Tensor], *, tolerance: float = 1e-5
) -> None:
    """Every matrix, relative to its own size."""
    assert ours.keys() == slow.keys()
    for name, value in slow.items():
        apart = float((ours[name] - value).norm()) / max(1e-30, float(value.norm()))
        assert apart <= tolerance, f"{name} is {apart:.1e} apart"


def histories(sizes: Sequence[tuple[int, int]], *, prompts: Sequence[int], seed: int = 0) -> list[History]:
    """Conversations of (prompt number, answer length), each prompt of the given length; every answer trains."""
    rng = random.Random(seed)
    starts = [[rng.randrange(3, 2000) for _ in range(length)] for length in prompts]
    made = []
    for owner, (prompt, length) in enumerate(sizes):
        ids = starts[prompt] + [rng.randrange(3, 2000) for _ in range(length)]
        trained = [False] * prompts[prompt] + [True] * length
        logprobs = [rng.uniform(-9, -5) if trains else math.nan for trains in trained]
        made.append(History(ids, trained, logprobs, rng.uniform(-2, 2), rng.uniform(0.5, 2), owner))
    return made


def choice(
    ids: Sequence[int], *, logprob: float = -1.0, text: str = "", calls: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """A choice as vLLM tells of it, with its token ids and log-probabilities."""
    content = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []} for token in ids
    ]
    message = {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})
    return {
        "index": 0,
        "finish_reason": "stop",
        "message": message,
        "logprobs": {"content": content},
        "token_ids": list(ids),
    }


def user(text: str) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": text}


def said(base: Base, text: str, **options: Any) -> dict[str, Any]:
    """A choice in which the model wrote this text and ended its turn."""
    ids = [*base.tokenizer.encode(text, add_special_tokens=False), base.tokenizer.eos_token_id]
    return choice(ids, text=text, **options)


def group(*rollouts: tuple[list[dict[str, Any]], float]) -> TrajectoryGroup:
    """A group of (messages and choices, reward)."""
    return TrajectoryGroup.model_validate(
        {"trajectories": [{"messages_and_choices": items, "reward": reward} for items, reward in rollouts]}
    )
