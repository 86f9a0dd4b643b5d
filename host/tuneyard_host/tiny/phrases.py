"""How people write requests, lists and numbers."""

from random import Random
from typing import Any

Turn = tuple[str, str]
Message = dict[str, Any]


def user(text: str) -> Message:
    """What the user says."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    """What the model answers."""
    return {"role": "assistant", "content": text}


def polite(rng: Random, request: str) -> str:
    """The same request in one of the ways people write it."""
    lead = rng.choice(["", "", "", "", "", "Please ", "Can you please ", "Now "])
    if lead:
        request = request[0].lower() + request[1:]
    return lead + request + rng.choice(["", "", "."])


def quoted(rng: Random, text: str) -> str:
    """The text bare or between quotes."""
    mark = rng.choice(["", "", "", "'", '"'])
    return f"{mark}{text}{mark}"


def listed(rng: Random, items: list[str], *, last: str = "") -> str:
    """The items as a list in a sentence; ``last`` is the word before the last one, if any."""
    mark = rng.choice(["", "", "", "'", '"'])
    items = [f"{mark}{item}{mark}" for item in items]
    if not last or len(items) == 1:
        return ", ".join(items)
    comma = "," if len(items) > 2 and rng.random() < 0.4 else ""
    return f"{', '.join(items[:-1])}{comma} {last} {items[-1]}"


def number(rng: Random, digits: int) -> int:
    """A number of at most so many digits, the lengths about equally likely."""
    return rng.randrange(10 ** rng.randint(1, digits))
