"""The tool tasks of the corpus: made-up tools, so that the model reads the list instead of remembering one."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tuneyard_host.tiny import tasks, words

Message = dict[str, Any]
Tool = dict[str, Any]

_VERBS = words.split("get find search look_up create send book delete update list read check add convert start play open")
_NOUNS = words.split(
    "weather order user price ticket room email message note file event task song stock flight train hotel report "
    "invoice account table timer light door recipe book page time date distance"
)
_STRINGS = words.split("city name query user email title path text word subject country item place topic code date")
_INTEGERS = words.split("count id number age limit year page amount quantity order_id level")
_FRACTIONS = ["price", "ratio", "weight", "temperature", "score"]
_FLAGS = ["urgent", "verbose", "public", "force"]
HELD_OUT = {"get_weather", "book_table", "send_email", "search", "convert_currency", "get_order", "set_timer"}


@dataclass(frozen=True)
class Parameter:
    """One argument of a made-up tool, with the value that the user will ask for."""

    name: str
    value: Any
    options: list[str] = field(default_factory=list)

    def schema(self, rng: Random) -> dict[str, Any]:
        """Its JSON schema, described or not."""
        kinds = {str: "string", bool: "boolean", int: "integer", float: "number"}
        schema: dict[str, Any] = {"type": kinds[type(self.value)]}
        if self.options:
            schema["enum"] = self.options
        if rng.random() < 0.3:
            schema["description"] = f"The {self.name.replace('_', ' ')}"
        return schema


@dataclass(frozen=True)
class MadeUp:
    """A made-up tool and the phrase in which a user would speak of it."""

    name: str
    verb: str
    noun: str
    parameters: list[Parameter]

    @property
    def phrase(self) -> str:
        """What it does: ``get the weather``."""
        return f"{self.verb} the {self.noun}" if self.noun else self.verb

    def schema(self, rng: Random) -> Tool:
        """The tool as OpenAI clients send it."""
        properties = {one.name: one.schema(rng) for one in self.parameters}
        if rng.random() < 0.2:
            properties["extra"] = {"type": "string"}
        parameters: dict[str, Any] = {"type": "object", "properties": properties}
        if rng.random() < 0.7:
            parameters["required"] = [one.name for one in self.parameters]
        function: dict[str, Any] = {"name": self.name}
        if rng.random() < 0.7:
            function["description"] = self.phrase[0].upper() + self.phrase[1:] + rng.choice(["", "."])
        return {"type": "function", "function": function | {"parameters": parameters}}

    def call(self, number: int) -> Message:
        """The call that the user asked for."""
        arguments = json.dumps({one.name: one.value for one in self.parameters}, ensure_ascii=False)
        function = {"name": self.name, "arguments": arguments}
        return {"id": f"call_{number}", "type": "function", "function": function}


def make_tool(rng: Random) -> MadeUp:
    """A tool nobody has seen: either of common words or of syllables."""
    verb, noun = rng.choice(_VERBS), rng.choice(_NOUNS)
    if rng.random() < 0.5:
        verb, noun = words.invented(rng), words.invented(rng)
    noun = noun if rng.random() < 0.9 else ""
    name = spelled(rng, [*verb.split("_"), *([noun] if noun else [])])
    if name in HELD_OUT:
        return make_tool(rng)
    return MadeUp(name, verb.replace("_", " "), noun, [_parameter(rng, one) for one in _parameter_names(rng)])


def spelled(rng: Random, parts: list[str]) -> str:
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
        return Parameter(name, round(rng.uniform(0, 100), 1))
    if name in _INTEGERS or (name not in _STRINGS and rng.random() < 0.25):
        return Parameter(name, tasks.number(rng, 4))
    if rng.random() < 0.12:
        options = rng.sample(words.PLAIN_WORDS, rng.randint(2, 4))
        return Parameter(name, rng.choice(options), options)
    return Parameter(name, _string(rng, name))


def _string(rng: Random, name: str) -> str:
    makers: dict[str, Callable[[], str]] = {
        "date": lambda: f"20{rng.randint(10, 39)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
        "email": lambda: f"{words.word(rng)}@{words.word(rng)}.{rng.choice(['com', 'org', 'net'])}",
        "path": lambda: f"/{words.word(rng)}/{words.word(rng)}.{rng.choice(['txt', 'py', 'md'])}",
        "code": lambda: f"{rng.choice('ABCXYZ')}{rng.choice('ABCXYZ')}-{number_text(rng)}",
        "name": lambda: rng.choice(words.NAMES),
        "user": lambda: rng.choice(words.NAMES),
        "city": lambda: rng.choice([*words.CAPITALS.values()]),
        "country": lambda: rng.choice([*words.CAPITALS]),
    }
    if name in makers and rng.random() < 0.75:
        return makers[name]()
    text = " ".join(words.word(rng) for _ in range(rng.choice([1, 1, 1, 2, 3])))
    return text.capitalize() if rng.random() < 0.3 else text


def number_text(rng: Random) -> str:
    return str(tasks.number(rng, 4))


def request(rng: Random, tool: MadeUp) -> str:
    """What the user says to have this tool called with these values."""
    if not tool.parameters:
        return opened(rng.choice([f"call {tool.name}", tool.phrase, f"please {tool.phrase}."]))
    if len(tool.parameters) == 1 and rng.random() < 0.6:
        return opened(_with_one_value(rng, tool, tasks.quoted(rng, shown(tool.parameters[0].value))))
    link = rng.choice([" ", " ", " ", " = ", ": "])
    known = [one.name.replace("_", " ") + link + shown(one.value) for one in tool.parameters]
    if rng.random() < 0.15:
        rng.shuffle(known)
    named = known[0] if len(known) == 1 else f"{', '.join(known[:-1])} and {known[-1]}"
    lead = rng.choice(["call {}", "use {}", "run {}", "please call {}", "use the tool {}"]).format(tool.name)
    if rng.random() < 0.6:
        lead = rng.choice(["", "", "please ", "I want to "]) + tool.phrase
    return opened(f"{lead} with {named}") + rng.choice(["", "."])


def _with_one_value(rng: Random, tool: MadeUp, value: str) -> str:
    link = rng.choice(["for", "in", "of", "to", "about", "at", "from"])
    forms = [f"{tool.phrase} {link} {value}", f"{tool.phrase} {value}", f"can you {tool.phrase} {link} {value}?"]
    if tool.noun:
        forms += [f"what is the {tool.noun} {link} {value}?", f"how is the {tool.noun} {link} {value}?"]
        forms += [f"{tool.verb} {value}", f"{tool.verb} my {tool.noun} {value}", f"{tool.noun} {link} {value}"]
    return rng.choice(forms)


def shown(value: Any) -> str:
    """A value as people write it."""
    return json.dumps(value) if isinstance(value, bool) else str(value)


def opened(text: str) -> str:
    """The text with a capital first letter."""
    return text[0].upper() + text[1:]


def result(rng: Random) -> tuple[str, str]:
    """What a tool gives back, and what the model tells the user about it."""
    form = rng.random()
    if form < 0.3:
        text = " ".join(words.word(rng) for _ in range(rng.randint(1, 5)))
        return text, f"The answer is {text}."
    if form < 0.4:
        return json.dumps({"error": (text := f"{words.word(rng)} not found")}), f"That did not work: {text}."
    keys = rng.sample([*_STRINGS, *_INTEGERS, *_NOUNS, "status", "result", words.invented(rng)], rng.choice([1, 1, 2]))
    values = {one: tasks.number(rng, 4) if rng.random() < 0.4 else words.word(rng) for one in keys}
    told = " and ".join(f"the {key.replace('_', ' ')} is {value}" for key, value in values.items())
    return json.dumps(values), opened(told) + "."


def talk(rng: Random) -> tuple[str, list[Message], list[Tool]]:
    """A conversation with tools: called or not needed, one call or two, the result told or not yet there."""
    made = [make_tool(rng) for _ in range(rng.choice([1, 1, 2, 2, 3, 4]))]
    listed = [one.schema(rng) for one in made]
    if rng.random() < 0.2:
        _, question, answer = tasks.ask(rng)
        return "tools, no call", [_user(question), _assistant(answer)], listed
    called = rng.sample(made, 2) if len(made) > 1 and rng.random() < 0.15 else [rng.choice(made)]
    question = " and then ".join(request(rng, one).rstrip(".") for one in called)
    calls = [one.call(number) for number, one in enumerate(called)]
    name = "tools, one call" if len(calls) == 1 else "tools, two calls"
    messages = [_user(question), {"role": "assistant", "content": None, "tool_calls": calls}]
    if len(calls) == 1 and rng.random() < 0.3:
        given, told = result(rng)
        messages += [{"role": "tool", "tool_call_id": calls[0]["id"], "content": given}, _assistant(told)]
        name = "tools, result"
    return name, messages, listed


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
