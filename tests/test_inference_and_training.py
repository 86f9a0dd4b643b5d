"""The two programs agree: what the service records of a rollout is what the trainer computes for the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_fixtures import House, served
from training_fixtures import base, files, one_thread  # noqa: F401
from tuneyard.configs import RLConfig
from tuneyard.settings import BaseModelSpec
from tuneyard.trajectories import TrajectoryGroup
from tuneyard_host.bases import Base
from tuneyard_host.training import batches
from tuneyard_host.training.adapters import read_adapter
from tuneyard_host.training.logprobs import of_row
from tuneyard_host.training.packing import pack

ROLLOUT = {
    "logprobs": True,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "max_tokens": 24,
    "n": 6,
}
PROMPTS = ["Answer yes, no or maybe.", "Write a line about the sea.", "What is 3 + 4?"]


@pytest.fixture(scope="module")
def service(files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """The inference service on its own copy of the tiny model, with the adapter in its bucket."""
    bucket: Path = tmp_path_factory.mktemp("bucket")
    (bucket / "trained").mkdir()
    for name, content in files.items():
        (bucket / "trained" / name).write_bytes(content)
    with served(BaseModelSpec(id="tuneyard/served", source="builtin:tiny"), bucket) as built:
        yield built


@pytest.mark.parametrize("adapter", [None, "trained"], ids=["base", "adapter"])
@pytest.mark.parametrize(
    "sampling", [{"temperature": 1.0}, {"temperature": 0.5, "top_p": 0.8}], ids=["plain", "cut"]
)
def test_recorded_log_probabilities_are_those_that_the_trainer_computes(
    service: House, base: Base, files: dict[str, bytes], adapter: str | None, sampling: dict[str, Any]
) -> None:
    answers = service.ask_all(
        [(text, {**ROLLOUT, **sampling, "adapter": adapter, "seed": 5}) for text in PROMPTS]
    )
    groups = [
        TrajectoryGroup.model_validate(
            {
                "trajectories": [
                    {
                        "messages_and_choices": [{"role": "user", "content": text}, choice],
                        "reward": choice["index"],
                    }
                    for choice in answer["choices"]
                ]
            }
        )
        for text, answer in zip(PROMPTS, answers, strict=True)
    ]

    histories, ledger = batches.of_groups(groups, base, RLConfig())
    with torch.no_grad(), nullcontext() if adapter is None else read_adapter(base, files).active():
        rows = [(row, of_row(base.model, row, chunk=64)[0]) for row in pack(histories, length=512)]

    written = sum(len(choice["token_ids"]) for answer in answers for choice in answer["choices"])
    assert [row["dropped"] for row in ledger] == [None] * 18
    assert sum(row.num_trained for row, _ in rows) == written > 60
    for row, computed in rows:
        torch.testing.assert_close(computed, row.logprobs, rtol=0, atol=1e-4)
    assert any((row.logprobs < -0.1).any() for row, _ in rows)
