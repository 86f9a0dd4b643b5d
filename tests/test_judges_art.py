"""The unmodified ART client against the live local stack."""

from __future__ import annotations

import asyncio
import importlib
import statistics
import uuid
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest

pytestmark = [
    pytest.mark.live,
    pytest.mark.judges,
    pytest.mark.filterwarnings("default"),
]
PROMPT = {"role": "user", "content": "Answer yes, no or maybe."}
REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}


@pytest.fixture(scope="module")
def art() -> Iterator[ModuleType]:
    """The client library, which is slow to import and warns about its own dependencies."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
            patch.delenv(name, raising=False)
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        patch.setenv("WEAVE_DISABLED", "true")
        importlib.import_module("art.serverless.backend")
        yield importlib.import_module("art")


def reward(choice: Any) -> float:
    return REWARDS.get((choice.message.content or "").strip(" .").lower(), 0.0)


def test_the_client_makes_logs_trains_pages_and_deletes(art: ModuleType, stack: Any):
    async def walk() -> None:
        client = art.serverless.client.Client(api_key=stack.api_key, base_url=f"{stack.base_url}/v1")
        model = await client.models.create(
            project="judges",
            name=f"client-{uuid.uuid4().hex[:8]}",
            base_model="tuneyard/tiny",
            return_existing=True,
        )
        same = await client.models.create(
            project="judges", name=model.name, base_model="tuneyard/tiny", return_existing=True
        )
        assert (model.entity, same.id) == (stack.team, model.id)
        chat = openai_client(stack)
        for _ in range(3):
            groups = [
                await group(art, chat, f"wandb-artifact:///{model.entity}/judges/{model.name}")
                for _ in range(2)
            ]
            await client.models.log(model_id=model.id, trajectory_groups=groups, split="train")
            job = await client.training_jobs.create(
                model_id=model.id,
                trajectory_groups=groups,
                experimental_config={"packed_sequence_length": 96},
            )
            events = await to_the_end(client, job.id)
            started, *steps, ended = [event for event in events if event.type != "warning"]
            assert (started.type, ended.type) == ("training_started", "training_ended")
            assert len(steps) == started.data["num_sequences"]
            assert all(isinstance(float(value), float) for step in steps for value in step.data.values())
        paged = [c.step async for c in client.models.checkpoints.list(model_id=model.id, limit=1)]
        newest = [
            c.step async for c in client.models.checkpoints.list(model_id=model.id, limit=2, order="desc")
        ]
        assert (paged, newest) == ([1, 2, 3], [3, 2, 1])
        gone = await client.models.checkpoints.delete(model_id=model.id, steps=[1, 3, 9])
        assert (gone.deleted_count, gone.not_found_steps) == (2, [9])
        assert [c.step async for c in client.models.checkpoints.list(model_id=model.id)] == [2]
        await client.models.delete(model_id=model.id)
        with pytest.raises(Exception, match="No model") as refused:
            await client.models.checkpoints.delete(model_id=model.id, steps=[2])
        assert type(refused.value).__name__ == "NotFoundError"
        await client.close()
        await chat.close()

    asyncio.run(walk())


def test_arts_own_loop_runs_and_its_reward_rises(
    art: ModuleType, stack: Any, tmp_path: Any, monkeypatch: Any
):
    monkeypatch.chdir(tmp_path)

    async def loop() -> list[float]:
        backend = art.serverless.backend.ServerlessBackend(
            api_key=stack.api_key, base_url=f"{stack.base_url}/v1"
        )
        model = art.TrainableModel(
            name=f"loop-{uuid.uuid4().hex[:8]}",
            project="judges",
            base_model="tuneyard/tiny",
            report_metrics=[],
        )
        await model.register(backend)
        chat = openai.AsyncOpenAI(api_key=model.inference_api_key, base_url=model.inference_base_url)
        rewards = []
        for step in range(15):
            groups = await asyncio.gather(*(group(art, chat, model.get_inference_name()) for _ in range(8)))
            rewards.append(statistics.fmean(t.reward for g in groups for t in g.trajectories))
            if rewards[-1] > 0.9:
                break
            result = await backend.train(model, groups, learning_rate=5e-3, advantage_balance=1.0)
            assert result.step == step + 1
            assert "loss/train" in result.metrics
        await backend.close()
        await chat.close()
        return rewards

    rewards = asyncio.run(loop())

    assert rewards[-1] > 0.9, rewards
    assert rewards[-1] > rewards[0] + 0.1, rewards


def test_the_client_gets_its_own_exception_types(art: ModuleType, stack: Any):
    async def refuse() -> None:
        stranger = art.serverless.client.Client(api_key="nope", base_url=f"{stack.base_url}/v1")
        with pytest.raises(openai.AuthenticationError, match="unknown or was revoked"):
            await stranger.models.create(project="p", name="n", base_model="tuneyard/tiny")
        client = art.serverless.client.Client(api_key=stack.api_key, base_url=f"{stack.base_url}/v1")
        with pytest.raises(openai.UnprocessableEntityError, match="tuneyard/tiny"):
            await client.models.create(project="p", name="n", base_model="nothing")
        await stranger.close()
        await client.close()

    asyncio.run(refuse())


def openai_client(stack: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key=stack.api_key, base_url=stack.inference_url)


async def group(art: ModuleType, client: Any, name: str) -> Any:
    """Eight rollouts of one prompt, as ART's users write them."""
    answer = await client.chat.completions.create(
        model=name, messages=[PROMPT], n=8, max_tokens=8, temperature=1.0
    )
    return art.TrajectoryGroup(
        [art.Trajectory(messages_and_choices=[PROMPT, c], reward=reward(c)) for c in answer.choices]
    )


async def to_the_end(client: Any, job_id: str) -> list[Any]:
    """All events of a job, fetched in pages of two until the last one is there."""
    found: list[Any] = []
    while not found or found[-1].type not in ("training_ended", "training_failed"):
        after = {"after": found[-1].id} if found else {}
        async for event in client.training_jobs.events.list(training_job_id=job_id, limit=2, **after):
            found.append(event)
    return found


def test_a_held_page_of_events_comes_as_soon_as_there_is_news(stack: Any):
    headers = {"Authorization": f"Bearer {stack.api_key}"}
    with httpx.Client(base_url=stack.base_url, headers=headers, timeout=60) as client:
        body = {"project": "judges", "name": uuid.uuid4().hex, "base_model": "tuneyard/tiny"}
        model = client.post("/v1/preview/models", json=body).json()
        body = {"model_id": model["id"], "trajectory_groups": []}
        job = client.post("/v1/preview/training-jobs", json=body).json()

        page = client.get(f"/v1/preview/training-jobs/{job['id']}/events").json()

    assert page["data"][-1]["type"] in ("warning", "training_ended")
