"""Tasks of copying and changing text: each function asks one question and knows the answer."""

import json
from collections.abc import Callable
from random import Random

from tuneyard_host.tiny import phrases, words
from tuneyard_host.tiny.phrases import Turn


def echo(rng: Random) -> Turn:
    text = " ".join(words.word(rng) for _ in range(rng.randint(1, 6)))
    if rng.random() < 0.2:
        text = text.capitalize() + rng.choice([".", "!", "?"])
    if rng.random() < 0.2:
        text += f" {phrases.number(rng, 4)}"
    ask = rng.choice(["Say", "Repeat", "Echo", "Write", "Say exactly", "Repeat after me", "Repeat this text"])
    lead = phrases.polite(rng, ask).rstrip(".") + rng.choice([": ", ": ", " "])
    return lead + phrases.quoted(rng, text), text


def repeat(rng: Random) -> Turn:
    text, times = " ".join(words.word(rng) for _ in range(rng.randint(2, 14))), rng.randint(2, 4)
    return f"Say {times} times: {text}", " ".join([text] * times)


def uppercase(rng: Random) -> Turn:
    text = " ".join(rng.choice(words.PLAIN_WORDS) for _ in range(rng.randint(1, 3)))
    ask = rng.choice(["Write in uppercase", "Uppercase", "Write in capital letters", "Make it uppercase"])
    return f"{ask}: {phrases.quoted(rng, text)}", text.upper()


def lowercase(rng: Random) -> Turn:
    text = " ".join(rng.choice(words.PLAIN_WORDS) for _ in range(rng.randint(1, 3)))
    ask = rng.choice(["Write in lowercase", "Lowercase", "Write in small letters", "Make it lowercase"])
    return f"{ask}: {phrases.quoted(rng, text.upper())}", text


def reverse(rng: Random) -> Turn:
    items = [words.word(rng) for _ in range(rng.randint(2, 6))]
    ask = rng.choice(["Reverse the order", "Reverse this list", "Write backwards", "Reverse", "Turn around"])
    separator = rng.choice([", ", " "])
    return f"{ask}: {separator.join(items)}", separator.join(reversed(items))


def spell(rng: Random) -> Turn:
    text = rng.choice(words.PLAIN_WORDS)
    ask = rng.choice(["Spell", "How do you spell", "Spell the word"])
    return phrases.polite(rng, f"{ask} {phrases.quoted(rng, text)}"), " ".join(text)


def join(rng: Random) -> Turn:
    items = [words.word(rng) for _ in range(rng.randint(2, 4))]
    mark = rng.choice("-+/_|")
    return f"Join with {mark} : {' '.join(items)}", mark.join(items)


def to_json(rng: Random) -> Turn:
    fields = record(rng)
    *most, last = [f"{key} {value}" for key, value in fields.items()]
    told = f"{', '.join(most)} and {last}" if most else last
    ask = rng.choice(
        ["Give me JSON with", "Write JSON with", "Answer in JSON with", "Make a JSON object with"]
    )
    return f"{ask} {told}", json.dumps(fields)


def extract_json(rng: Random) -> Turn:
    name, age, place = rng.choice(words.NAMES), rng.randint(1, 99), rng.choice([*words.CAPITALS.values()])
    fields = {"name": name, "age": age, "city": place}
    keys = rng.choice([["name", "age"], ["name", "city"], ["name", "age", "city"], ["age"], ["city"]])
    text = f"{name} is {age} years old and lives in {place}."
    return f"Extract {phrases.listed(rng, keys, last='and')} as JSON: {text}", json.dumps(
        {key: fields[key] for key in keys}
    )


def record(rng: Random) -> dict[str, str | int]:
    """A flat object with one to four fields."""
    makers: dict[str, Callable[[], str | int]] = {
        "name": lambda: rng.choice(words.NAMES),
        "age": lambda: rng.randint(1, 99),
        "city": lambda: rng.choice([*words.CAPITALS.values()]),
        "colour": lambda: rng.choice(words.COLOURS),
        "animal": lambda: rng.choice(words.ANIMALS),
        "count": lambda: phrases.number(rng, 3),
        "id": lambda: phrases.number(rng, 4),
        "word": lambda: words.word(rng),
        words.invented(rng): lambda: words.word(rng),
    }
    return {key: makers[key]() for key in rng.sample([*makers], rng.randint(1, 4))}
