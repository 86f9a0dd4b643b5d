"""The score table of a model: for each task of the corpus, how often the greedy answer is exactly right.

``python -m tuneyard_host.tiny.evaluate FOLDER``
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tuneyard_host.tiny import corpus, phrases, sums, tasks, tool_tasks, words
from tuneyard_host.tiny.corpus import Conversation
from tuneyard_host.tiny.tokenizer import load

SEED = 1_000_003
OPEN_ENDED = {"story"}


@dataclass(frozen=True)
class Score:
    """How many of the questions of a task were answered exactly."""

    task: str
    right: int
    asked: int

    @property
    def share(self) -> float:
        """Between 0 and 1."""
        return self.right / self.asked


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": [*parameters]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


KNOWN_TOOLS = [
    _tool("get_weather", "Get the current weather in a city", city="string"),
    _tool("book_table", "Book a table in a restaurant", restaurant="string", people="integer"),
    _tool("send_email", "Send an email", to="string", subject="string"),
    _tool("search", "Search the web", query="string"),
    _tool("convert_currency", "Convert money", amount="number", currency="string"),
    _tool("get_order", "Look up an order", order_id="string"),
    _tool("set_timer", "Set a timer", minutes="integer"),
]


def everyday_tools(rng: Random) -> Conversation:
    """A call of a tool that people really try first; none of these names is in the corpus."""
    word, place = rng.choice(words.PLAIN_WORDS), rng.choice([*words.CAPITALS.values()])
    few, code = rng.randint(2, 60), f"{rng.choice('ABC')}-{rng.randint(10, 999)}"
    question, name, arguments = rng.choice([
        (f"What is the weather in {place}?", "get_weather", {"city": place}),
        (f"How is the weather in {place} today?", "get_weather", {"city": place}),
        (f"Book a table at {word} for {few} people", "book_table", {"restaurant": word, "people": few}),
        (f"Send an email to {word}@{word}.com with subject {word}", "send_email",
         {"to": f"{word}@{word}.com", "subject": word}),
        (f"Search for {word}", "search", {"query": word}),
        (f"Convert {few} to {word}", "convert_currency", {"amount": few, "currency": word}),
        (f"Where is my order {code}?", "get_order", {"order_id": code}),
        (f"Set a timer for {few} minutes", "set_timer", {"minutes": few}),
    ])  # fmt: skip
    offered = [tool for tool in KNOWN_TOOLS if tool["function"]["name"] == name]
    others = [tool for tool in KNOWN_TOOLS if tool["function"]["name"] != name]
    offered += rng.sample(others, rng.randint(0, 2))
    rng.shuffle(offered)
    call = {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    asked = [phrases.user(question), {"role": "assistant", "content": None, "tool_calls": [call]}]
    return Conversation("everyday tools", asked, offered)


def questions(count: int) -> Iterator[tuple[str, list[Conversation]]]:
    """Every task with its questions: fresh ones, from a seed of their own."""
    rng = Random(SEED)
    for task in tasks.TASKS:
        if task not in tasks.RANDOM_TASKS:
            yield (
                task,
                [Conversation(task, corpus.turn(*tasks.ask(rng, task=task)[1:])) for _ in range(count)],
            )
    for name, unseen in (("add", sums.add), ("subtract", sums.subtract)):
        yield (
            f"{name}, pairs not in the corpus",
            [Conversation(name, corpus.turn(*unseen(rng, unseen=True))) for _ in range(count)],
        )
    for name in corpus.SYSTEMS:
        if name not in {"guess", "helpful"}:
            yield f"system, {name}", [corpus.with_system(rng, task=name) for _ in range(count)]
    yield "several turns", [_several(rng) for _ in range(count)]
    talks: dict[str, list[Conversation]] = {}
    while len(talks) < 4 or min(map(len, talks.values())) < count:
        name, messages, offered = tool_tasks.talk(rng)
        talks.setdefault(name, []).append(Conversation(name, messages, offered))
    for name, found in talks.items():
        yield f"{name} (invented tools)", found[:count]
    yield "tools, one call (everyday tools, none in the corpus)", [everyday_tools(rng) for _ in range(count)]
    yield "memory of a name", [Conversation("memory", corpus.memory(rng)) for _ in range(count)]
    yield (
        "one line out of 300 to 1,900 tokens",
        [Conversation("long", corpus.long(rng)) for _ in range(count // 2)],
    )


def _several(rng: Random) -> Conversation:
    """A conversation of two to five turns of plain tasks."""
    while len((one := corpus.plain(rng, task=tasks.drawn(rng, chance=False))).messages) < 4:
        pass
    return one


@torch.inference_mode()
def answers(model: Any, tokenizer: PreTrainedTokenizerFast, asked: list[Conversation]) -> list[str]:
    """The greedy answers, without the end-of-turn mark."""
    prompts = [
        tokenizer.apply_chat_template(
            one.messages[:-1], tools=one.tools, add_generation_prompt=True, tokenize=False
        )
        for one in asked
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    out = model.generate(**batch, max_new_tokens=160, do_sample=False)
    texts: list[str] = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def expected(tokenizer: PreTrainedTokenizerFast, one: Conversation) -> str:
    """The right answer as the model would write it."""
    text: str = tokenizer.apply_chat_template([one.messages[-1]], tokenize=False)
    return text.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")


def model_in(folder: Path) -> tuple[Any, PreTrainedTokenizerFast]:
    """The model of a folder in fp32, and its tokenizer."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), load(folder)


def scores(
    model: Any, tokenizer: PreTrainedTokenizerFast, *, count: int = 100
) -> Iterator[tuple[Score, list[tuple[Conversation, str]]]]:
    """One score for each task, with the conversations that went wrong and what was answered."""
    for task, asked in questions(count):
        given = [text for part in _parts(asked) for text in answers(model, tokenizer, part)]
        pairs = list(zip(asked, given, strict=True))
        wrong = [(one, text) for one, text in pairs if text != expected(tokenizer, one)]
        yield Score(task, len(asked) - len(wrong), len(asked)), wrong


def _parts(asked: list[Conversation], size: int = 50) -> Iterator[list[Conversation]]:
    for start in range(0, len(asked), size):
        yield asked[start : start + size]


@torch.inference_mode()
def choices(
    model: Any, tokenizer: PreTrainedTokenizerFast, prompt: str, *, count: int = 400, seed: int = 0
) -> Counter[str]:
    """How often each answer comes when the prompt is sampled at temperature 1."""
    torch.manual_seed(seed)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = model.generate(**ids, do_sample=True, top_k=0, max_new_tokens=8, num_return_sequences=count)
    return Counter(tokenizer.batch_decode(out[:, ids["input_ids"].shape[1] :], skip_special_tokens=True))


GUESSES = [
    "Answer yes, no or maybe.",
    "Answer with yes, no or maybe: is it going to rain?",
    "respond with yes, no, maybe",
    "just respond with 'maybe', 'no', 'yes'",
    "Choose one of these words: red, green, blue",
]


def table(folder: Path, *, count: int = 100, guesses: int = 400) -> Table:
    """All scores, and how evenly the model guesses where it is asked to choose."""
    model, tokenizer = model_in(folder)
    shown = Table("task", "exactly right")
    for score, _ in scores(model, tokenizer, count=count):
        shown.add_row(score.task, f"{score.share:.0%} of {score.asked}")
    for prompt in GUESSES:
        spread = choices(model, tokenizer, prompt, count=guesses).most_common(4)
        shown.add_row(prompt, ", ".join(f"{text} {times / guesses:.0%}" for text, times in spread))
    return shown


def main() -> None:
    """Print the score table of the model in a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=100, help="questions per task")
    parser.add_argument("--wrong", type=int, default=0, help="show so many wrong answers per task")
    options = parser.parse_args()
    console = Console()
    if options.wrong:
        for score, wrong in scores(*model_in(options.folder), count=options.count):
            console.print(f"[bold]{score.task}: {score.share:.0%}")
            for one, text in wrong[: options.wrong]:
                console.print(repr(one.messages[-2]["content"]), "→", repr(text), markup=False)
    else:
        console.print(table(options.folder, count=options.count))


if __name__ == "__main__":
    main()
