"""The tour: reinforcement until the model prefers an answer, then examples until it knows facts."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tuneyard_host.demo import show, stack, tasks
from tuneyard_host.demo.client import Client
from tuneyard_host.demo.show import console
from tuneyard_host.local.folder import LocalError

GOAL, MOST_JOBS = 0.95, 15
SFT = {"batch_size": 5}
REPEATS = 40


def run(out: Path, *, base_url: str | None, api_key: str | None) -> None:
    """Take the tour on this stack, or on one of its own; LocalError when it does not end where it should."""
    began = time.monotonic()
    with ExitStack() as cleanup:
        if base_url is None or api_key is None:
            with console.status("Starting the local stack"):
                found = cleanup.enter_context(stack.running(out / "state"))
            base_url, api_key = found["base_url"], found["api_key"]
        client = cleanup.enter_context(Client(str(base_url), str(api_key)))
        console.print(f"[bold]Tuneyard[/] at {base_url}, ready after {time.monotonic() - began:.0f} s\n")
        stamp = time.strftime("%m%d-%H%M%S")
        reinforce(client, f"yes-no-maybe-{stamp}", out / "reward.png")
        teach(client, f"new-facts-{stamp}")
    console.print(f"\n[bold green]Done[/] in {time.monotonic() - began:.0f} s. Picture: {out / 'reward.png'}")


def reinforce(client: Client, name: str, picture: Path) -> None:
    """Train on the model's own rollouts until their mean reward reaches the goal."""
    console.print("[bold]Reinforcement learning[/]: yes is worth 0.5, no 0.75, maybe 1")
    model_id, model = client.create_model("demo", name)
    rewards: list[float] = []
    answers: list[list[float]] = []
    for job in range(MOST_JOBS + 1):
        groups = rollouts(client, model)
        earned = [trajectory["reward"] for group in groups for trajectory in group["trajectories"]]
        rewards.append(sum(earned) / len(earned))
        answers.append([Counter(earned)[worth] / len(earned) for worth in (1.0, 0.75, 0.5, 0.0)])
        console.print(f"  checkpoint {job}: mean reward [bold cyan]{rewards[-1]:.3f}[/]  {_bar(rewards[-1])}")
        if rewards[-1] > GOAL:
            break
        if job < MOST_JOBS:
            show.follow(f"RL job {job + 1}", client.events(client.train(model_id, groups, {})))
    show.draw(rewards, answers, GOAL, picture)
    if rewards[-1] <= GOAL:
        raise LocalError(
            f"The mean reward is {rewards[-1]:.3f} after {MOST_JOBS} jobs, and was to be above {GOAL}."
        )
    console.print(
        f"  above {GOAL} after {len(rewards) - 1} jobs; each made a checkpoint, and it answers at once\n"
    )


def rollouts(client: Client, model: str) -> list[dict[str, Any]]:
    """A group of rollouts for every prompt, sampled from the newest checkpoint."""
    asked = client.chats(
        model, [tasks.ask(prompt) for prompt in tasks.PROMPTS], n=tasks.ROLLOUTS, temperature=1, max_tokens=12
    )
    return [tasks.group(prompt, choices) for prompt, choices in zip(tasks.PROMPTS, asked, strict=True)]


def teach(client: Client, name: str) -> None:
    """Teach facts that no model can know, by an uploaded file of examples."""
    console.print("[bold]Supervised fine-tuning[/]: facts that no model can know")
    model_id, model = client.create_model("demo", name)
    before = answers(client, model)
    job = client.fine_tune(model_id, client.upload(tasks.lessons(REPEATS)), SFT)
    show.follow("SFT job", client.events(job))
    after = answers(client, model)
    show.before_and_after(
        [(question, before[question], after[question], taught) for question, taught in tasks.FACTS.items()]
    )
    known = sum(after[question] == taught for question, taught in tasks.FACTS.items())
    if known < len(tasks.FACTS):
        raise LocalError(
            f"The model answers {known} of {len(tasks.FACTS)} questions as it was taught, and not all."
        )


def answers(client: Client, model: str) -> dict[str, str]:
    """The model's surest answer to each question."""
    asked = client.chats(
        model, [tasks.ask(question) for question in tasks.FACTS], temperature=0, max_tokens=32
    )
    texts = [choices[0]["message"]["content"].strip() for choices in asked]
    return dict(zip(tasks.FACTS, texts, strict=True))


def _bar(share: float, width: int = 24) -> str:
    full = round(share * width)
    return f"[cyan]{'█' * full}[/][dim]{'░' * (width - full)}[/]"
