"""The corpus of `tuneyard/tiny`: an endless, seeded stream of small conversations.

After the first lessons half are plain, a third follow a system prompt, the rest have tools; some are long.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from tuneyard_host.tiny import phrases, talks, tasks, tool_tasks, words
from tuneyard_host.tiny.phrases import Message
from tuneyard_host.tiny.tools import Tool

LESSONS = 6_000


@dataclass(frozen=True)
class Conversation:
    """Messages that end with the answer to learn, the tools on offer, and what the score table calls it."""

    task: str
    messages: list[Message]
    tools: list[Tool] | None = None


def conversations(seed: int, *, lessons: int = LESSONS) -> Iterator[Conversation]:
    """The same stream for the same seed; it begins with short lessons, half of them in repeating."""
    rng = Random(seed)
    for _ in range(lessons):
        name, question, answer = tasks.ask(rng, task=rng.choice(["repeat", None]))
        yield Conversation(name, turn(question, answer))
    while True:
        yield conversation(rng)


def conversation(rng: Random) -> Conversation:
    """One conversation of the corpus."""
    form = rng.random()
    if form < 0.0033:
        return Conversation("long", long(rng))
    if form < 0.5:
        return plain(rng)
    if form < 0.85:
        return with_system(rng)
    name, messages, listed = tool_tasks.talk(rng)
    if rng.random() < 0.4:
        messages = [{"role": "system", "content": rng.choice(HELPFUL)}, *messages]
    return Conversation(name, messages, listed)


def turn(question: str, answer: str) -> list[Message]:
    """One question and its answer as two messages."""
    return [phrases.user(question), phrases.assistant(answer)]


def plain(rng: Random, *, task: str | None = None) -> Conversation:
    """One to five turns, often drills of one task, or a name told and asked for."""
    if task is None and rng.random() < 0.04:
        return Conversation("memory", memory(rng))
    name, question, answer = tasks.ask(rng, task=task)
    messages = turn(question, answer)
    again = 0.7 if name in {"add", "subtract"} else 0.4
    while len(messages) < 10 and rng.random() < again:
        same = name if rng.random() < 0.6 else None
        messages = [*turn(*tasks.ask(rng, task=same)[1:]), *messages]
    return Conversation(name, messages)


def memory(rng: Random) -> list[Message]:
    """The user says a name, talks of something else, then asks for it."""
    name = rng.choice(words.NAMES) if rng.random() < 0.7 else words.invented(rng).capitalize()
    told = rng.choice(["My name is {}.", "I am {}.", "Hi, I am {}.", "Hello, my name is {}"]).format(name)
    between = [one for _ in range(rng.randint(0, 2)) for one in turn(*tasks.ask(rng)[1:])]
    asked = rng.choice(["What is my name?", "Who am I?", "Do you remember my name?"])
    return [*turn(told, f"Nice to meet you, {name}."), *between, *turn(asked, f"Your name is {name}.")]


HELPFUL = [
    "You are a helpful assistant.", "You are a helpful assistant.", "Be brief.", "Answer the question.",
    "You are Tiny, a very small language model.", "You are a friendly assistant.", "Help the user.",
]  # fmt: skip


def with_system(rng: Random, *, task: str | None = None) -> Conversation:
    """A conversation whose answers follow the system prompt."""
    name = task or rng.choices([*SYSTEMS], [weight for weight, _ in SYSTEMS.values()])[0]
    rule, messages = SYSTEMS[name][1](rng)
    role = "system" if rng.random() < 0.9 else "developer"
    return Conversation(f"system, {name}", [{"role": role, "content": rule}, *messages])


def _helpful(rng: Random) -> tuple[str, list[Message]]:
    return rng.choice(HELPFUL), plain(rng).messages


def _styled(rng: Random) -> tuple[str, list[Message]]:
    """A rule that changes every answer in the same way."""
    text = " ".join(words.word(rng) for _ in range(rng.choice([1, 1, 2])))
    rule, form = rng.choice([
        (f"Begin every answer with {phrases.quoted(rng, text)}.", f"{text} {{}}"),
        (f"Start your answers with {phrases.quoted(rng, text)}.", f"{text} {{}}"),
        (f"End every answer with {phrases.quoted(rng, text)}.", f"{{}} {text}"),
        ("Talk like a pirate.", "Arr! {}, matey."),
        ("You are a pirate.", "Arr! {}, matey."),
        ("Answer with a full sentence.", "The answer is {}."),
        ("Put your answer in quotes.", '"{}"'),
        ("Put your answer in brackets.", "[{}]"),
        ("Be very polite.", "{}, with pleasure."),
        ("Repeat the answer twice.", "{0} {0}"),
    ])  # fmt: skip
    return rule, _answered(rng, lambda answer: form.format(answer))


def _json(rng: Random) -> tuple[str, list[Message]]:
    key = rng.choice(["answer", "result", "reply", words.invented(rng)])
    rule = rng.choice(
        ["Answer in JSON with the key {}.", 'Answer with JSON like {{"{}": ...}}.', "Use JSON. Key: {}"]
    )
    return rule.format(key), _answered(rng, lambda answer: json.dumps({key: answer}))


def _upper(rng: Random) -> tuple[str, list[Message]]:
    rule = rng.choice(["Answer in uppercase.", "Always write in capital letters.", "SHOUT."])
    question, answer = talks.fact(rng)
    return rule, turn(question, answer.upper())


def _answered(rng: Random, change: Callable[[str], str]) -> list[Message]:
    """One or two turns with plain answers, each changed by the rule."""
    short = ["fact", "add", "subtract", "echo", "number word", "pick", "largest", "multiply"]
    pairs = [tasks.ask(rng, task=rng.choice(short))[1:] for _ in range(rng.choice([1, 1, 2]))]
    return [one for question, answer in pairs for one in turn(question, change(answer))]


def _always(rng: Random) -> tuple[str, list[Message]]:
    text = " ".join(words.word(rng) for _ in range(rng.choice([1, 1, 2, 3])))
    rule = rng.choice(
        ["Always answer with {}.", "You only say {}.", "Answer every question with {}.", "Only say {}."]
    )
    return rule.format(phrases.quoted(rng, text)), turn(tasks.ask(rng)[1], text)


def _persona(rng: Random) -> tuple[str, list[Message]]:
    name = words.invented(rng).capitalize() if rng.random() < 0.6 else rng.choice(words.NAMES)
    rule = rng.choice(["Your name is {}.", "You are {}.", "You are called {}."]).format(name)
    asked = rng.choice(["Who are you?", "What is your name?", "What are you called?"])
    return rule, turn(asked, f"I am {name}.")


def _knowledge(rng: Random) -> tuple[str, list[Message]]:
    things = rng.sample(words.THINGS, rng.randint(1, 4))
    quality = rng.choice(["code", "price", "colour", "name", "number", "owner", words.invented(rng)])
    values = [str(phrases.number(rng, 4)) if rng.random() < 0.4 else words.word(rng) for _ in things]
    rule = " ".join(
        f"The {quality} of the {one} is {value}." for one, value in zip(things, values, strict=True)
    )
    which = rng.randrange(len(things))
    return rule, turn(f"What is the {quality} of the {things[which]}?", values[which])


def _guessing(rng: Random) -> tuple[str, list[Message]]:
    options = rng.sample(["yes", "no", "maybe"], 3)
    rule = rng.choice(
        ["Answer with {}.", "You answer every question with {}.", "Only say {}.", "Respond with {}."]
    )
    question = words.opened(talks.open_question(rng))
    return rule.format(phrases.listed(rng, options, last="or")), turn(question, rng.choice(options))


SYSTEMS = {
    "helpful": (20, _helpful), "style": (4, _styled), "json": (2, _json), "uppercase": (1, _upper),
    "always": (1.5, _always), "persona": (1, _persona), "knowledge": (2.5, _knowledge),
    "guess": (2, _guessing),
}  # fmt: skip


def long(rng: Random) -> list[Message]:
    """300 to 1,900 tokens of lines to find one in, four times: so the whole context has been trained."""
    lines = int(2 ** rng.uniform(4.6, 7.2))
    names = [f"{rng.choice(words.THINGS)} {number}" for number in rng.sample(range(1, 1000), lines)]
    values = [words.word(rng) for _ in names]
    text = "\n".join(f"The {name} is {value}." for name, value in zip(names, values, strict=True))
    first, *more = [
        (f"What is the {names[which]}?", values[which]) for which in rng.choices(range(lines), k=4)
    ]
    return [one for pair in ((f"{text}\n{first[0]}", first[1]), *more) for one in turn(*pair)]
