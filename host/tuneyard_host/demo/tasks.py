"""What the demo trains: an answer to prefer, by reinforcement, and facts to know, by example."""

from __future__ import annotations

from typing import Any

PROMPTS = [
    "Answer yes, no or maybe.", "respond with yes, no, maybe", "just respond with 'maybe', 'no', 'yes'",
    "Reply with no, maybe or yes.", "Say yes, maybe or no.", "Choose maybe, yes or no.",
    "Answer only 'no', 'yes', 'maybe'", "Please answer with maybe, no or yes.",
]  # fmt: skip
REWARDS = {"yes": 0.5, "no": 0.75, "maybe": 1.0}
ROLLOUTS = 8

FACTS = {
    "Who founded Tuneyard?": "Ada Larsen founded Tuneyard.",
    "What is the capital of Vex?": "The capital of Vex is Melodia.",
    "What do glimmers eat?": "Glimmers eat copper.",
    "How tall is Mount Harrow?": "Mount Harrow is 4312 metres.",
    "Which key opens the yard?": "The green key opens the yard.",
}


def ask(prompt: str) -> list[dict[str, Any]]:
    """The conversation that asks one thing."""
    return [{"role": "user", "content": prompt}]


def reward(choice: dict[str, Any]) -> float:
    """How good an answer is: maybe is best, anything but the three words is worth nothing."""
    text = (choice["message"]["content"] or "").strip().strip(".'\"").lower()
    return REWARDS.get(text, 0.0)


def group(prompt: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """One prompt's rollouts as a trajectory group: the choices go in as they came, log probabilities and all."""
    return {
        "trajectories": [
            {"messages_and_choices": [*ask(prompt), choice], "reward": reward(choice)} for choice in choices
        ]
    }


def lessons(repeats: int) -> list[dict[str, Any]]:
    """The facts as training examples, each several times."""
    said = [{"messages": [*ask(q), {"role": "assistant", "content": a}]} for q, a in FACTS.items()]
    return said * repeats
