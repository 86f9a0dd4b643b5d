"""The table of plain tasks, each with its share of the corpus."""

from collections.abc import Callable
from random import Random

from tuneyard_host.tiny import sums, talks, texts
from tuneyard_host.tiny.phrases import Turn

TASKS: dict[str, tuple[float, Callable[[Random], Turn]]] = {
    "echo": (8, texts.echo), "repeat": (2, texts.repeat),
    "uppercase": (3, texts.uppercase), "lowercase": (3, texts.lowercase),
    "reverse": (2, texts.reverse), "spell": (2, texts.spell), "join": (1.5, texts.join),
    "to json": (4, texts.to_json), "extract json": (2, texts.extract_json),
    "sort numbers": (6, sums.sort_numbers), "sort words": (2, sums.sort_words),
    "count up": (3, sums.count_up), "how many": (3, sums.how_many), "largest": (2, sums.largest),
    "pick": (2, sums.pick), "add": (20, sums.add), "subtract": (9, sums.subtract),
    "multiply": (3, sums.multiply), "compare": (1.5, sums.compare),
    "fact": (14, talks.fact), "number word": (1, talks.number_word), "unknown": (3, talks.unknown),
    "read": (4, talks.read), "talk": (2, talks.talk), "story": (2, talks.story),
    "guess": (5, talks.guess), "choose": (4, talks.choose),
}  # fmt: skip
RANDOM_TASKS = {"guess", "choose", "story"}
"""The tasks with more than one right answer."""


def drawn(rng: Random, *, chance: bool = True) -> str:
    """The name of a task, by weight; without ``chance``, one with a single right answer."""
    shares = {name: share for name, (share, _) in TASKS.items() if chance or name not in RANDOM_TASKS}
    return rng.choices([*shares], [*shares.values()])[0]


def ask(rng: Random, *, task: str | None = None) -> tuple[str, str, str]:
    """A task, its question and its answer, drawn by weight unless the task is named."""
    name = task or drawn(rng)
    return name, *TASKS[name][1](rng)
