"""Made-up tools: so many different ones that the model learns to read the list and remembers none."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from tuneyard_host.tiny import phrases, words
from tuneyard_host.tiny.phrases import Message

Tool = dict[str, Any]
Value = str | int | float | bool

_VERBS = words.split(
    "get find search look_up create send book delete update list read check add convert start stop play "
    "open set show compute"
)
_NOUNS = words.split(
    "weather order user price ticket room email message note file event task song stock flight train "
    "hotel report invoice account table timer light door recipe book page time date distance value "
    "currency number"
)
_STRINGS = words.split(
    "city name query user email title path text word subject country item place topic code date key to"
)
_INTEGERS = words.split("count id number age limit year page amount quantity order_id level minutes people")
_FRACTIONS = words.split("price ratio weight temperature score")
_FLAGS = words.split("urgent verbose public force")
HELD_OUT = {"get_weather", "book_table", "send_email", "search", "convert_currency", "get_order", "set_timer"}
"""The tools of the evaluation: no tool of the corpus has one of these names."""


@dataclass(frozen=True)
class Parameter:
    """One argument of a made-up tool, with the value that the user will ask for."""

    name: str
    value: Value
    options: tuple[str, ...] = ()

    def schema(self, rng: Random) -> dict[str, Any]:
        """Its JSON schema, described or not."""
        kinds = {str: "string", bool: "boolean", int: "integer", float: "number"}
        schema: dict[str, Any] = {"type": kinds[type(self.value)]}
        if self.options:
            schema["enum"] = [*self.options]
        if rng.random() < 0.3:
            schema["description"] = f"The {self.name.replace('_', ' ')}"
        return schema

    def again(self, rng: Random) -> "Parameter":
        """The same argument with another value of its type."""
        if self.options:
            return replace(self, value=rng.choice(self.options))
        match self.value:
            case bool():
                return replace(self, value=not self.value)
            case int():
                return replace(self, value=phrases.number(rng, 4))
            case float():
                return replace(self, value=_fraction(rng))
        return replace(self, value=_string(rng, self.name))


@dataclass(frozen=True)
class MadeUp:
    """A made-up tool, and the words in which a user would speak of it."""

    name: str
    verb: str
    noun: str
    parameters: list[Parameter] = field(default_factory=list)

    @property
    def phrase(self) -> str:
        """What it does: ``get the weather``."""
        return f"{self.verb} the {self.noun}" if self.noun else self.verb

    def schema(self, rng: Random) -> Tool:
        """The tool as OpenAI clients send it, with or without the fields that some of them add."""
        properties = {one.name: one.schema(rng) for one in self.parameters}
        if rng.random() < 0.15:
            properties["extra"] = {"type": "string"}
        parameters: dict[str, Any] = {"type": "object", "properties": properties}
        if rng.random() < 0.7:
            parameters["required"] = [one.name for one in self.parameters]
        if rng.random() < 0.1:
            parameters["additionalProperties"] = False
        function: dict[str, Any] = {"name": self.name}
        if rng.random() < 0.7:
            function["description"] = words.opened(self.phrase) + rng.choice(["", "."])
        return {"type": "function", "function": function | {"parameters": parameters}}

    def again(self, rng: Random) -> "MadeUp":
        """The same tool, asked for with other values."""
        return replace(self, parameters=[one.again(rng) for one in self.parameters])

    def call(self, number: int) -> Message:
        """The call that the user asked for."""
        arguments = json.dumps({one.name: one.value for one in self.parameters})
        return {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": self.name, "arguments": arguments},
        }


def make(rng: Random) -> MadeUp:
    """A tool made of common words or of syllables."""
    verb, noun = rng.choice(_VERBS), rng.choice(_NOUNS)
    if rng.random() < 0.5:
        verb, noun = (words.invented(rng, syllables=rng.choice([1, 2, 2])) for _ in range(2))
    noun = noun if rng.random() < 0.9 else ""
    name = _spelled(rng, [*verb.split("_"), *([noun] if noun else [])])
    if name in HELD_OUT:
        return make(rng)
    return MadeUp(name, verb.replace("_", " "), noun, [_parameter(rng, one) for one in _parameter_names(rng)])


def key(rng: Random) -> str:
    """A key such as tools use in their results."""
    return rng.choice([*_STRINGS, *_INTEGERS, *_NOUNS, "status", "result", words.invented(rng)])


def _spelled(rng: Random, parts: list[str]) -> str:
    """Words as one identifier: snake case mostly, else camel case or a dash."""
    style = rng.random()
    if style < 0.75:
        return "_".join(parts)
    return "".join([parts[0], *(one.capitalize() for one in parts[1:])]) if style < 0.9 else "-".join(parts)


def _parameter_names(rng: Random) -> list[str]:
    count = rng.choices([0, 1, 2, 3], [1, 8, 6, 3])[0]
    names: dict[str, None] = {}
    while len(names) < count:
        group = rng.choices([_STRINGS, _INTEGERS, _FRACTIONS, _FLAGS, None], [8, 4, 1, 1, 6])[0]
        names[rng.choice(group) if group else words.invented(rng)] = None
    return [*names]


def _parameter(rng: Random, name: str) -> Parameter:
    if name in _FLAGS:
        return Parameter(name, rng.random() < 0.5)
    if name in _FRACTIONS:
        return Parameter(name, _fraction(rng))
    if name in _INTEGERS or (name not in _STRINGS and rng.random() < 0.25):
        return Parameter(name, phrases.number(rng, 4))
    if rng.random() < 0.12:
        options = rng.sample(words.PLAIN_WORDS, rng.randint(2, 4))
        return Parameter(name, rng.choice(options), tuple(options))
    return Parameter(name, _string(rng, name))


def _fraction(rng: Random) -> float:
    return round(rng.uniform(0, 100), 1)


def _string(rng: Random, name: str) -> str:
    makers: dict[str, Callable[[], str]] = {
        "date": lambda: f"20{rng.randint(10, 39)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
        "email": lambda: f"{words.word(rng)}@{words.word(rng)}.{rng.choice(['com', 'org', 'net'])}",
        "path": lambda: f"/{words.word(rng)}/{words.word(rng)}.{rng.choice(['txt', 'py', 'md'])}",
        "code": lambda: f"{''.join(rng.choices('ABCDEXYZ', k=rng.randint(1, 2)))}-{phrases.number(rng, 4)}",
        "name": lambda: rng.choice(words.NAMES),
        "city": lambda: rng.choice([*words.CAPITALS.values()]),
        "country": lambda: rng.choice([*words.CAPITALS]),
    }
    makers |= {"to": makers["email"], "user": makers["name"], "key": makers["code"], "place": makers["city"]}
    kind = rng.random()
    if kind < 0.12:
        return makers[rng.choice([*makers])]()
    if kind < 0.18:
        return str(phrases.number(rng, 4))
    if name in makers and kind < 0.8:
        return makers[name]()
    text = " ".join(words.word(rng) for _ in range(rng.choice([1, 1, 1, 2, 3])))
    return text.capitalize() if rng.random() < 0.3 else text
