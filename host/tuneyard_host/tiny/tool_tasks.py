"""The tool tasks of the corpus: when to call, which tool, with which words of the request as arguments."""

import json
from random import Random

from tuneyard_host.tiny import phrases, tasks, tools, words
from tuneyard_host.tiny.phrases import Message
from tuneyard_host.tiny.tools import MadeUp, Tool, Value

_LINKS = ["for", "in", "of", "to", "about", "at", "from", "with", "by"]


def request(rng: Random, tool: MadeUp) -> str:
    """What the user says to have this tool called with these values."""
    count = len(tool.parameters)
    if not count:
        return words.opened(rng.choice([f"call {tool.name}", tool.phrase, f"please {tool.phrase}."]))
    if count == 1 and rng.random() < 0.65:
        return words.opened(_with_one_value(rng, tool, phrases.quoted(rng, shown(tool.parameters[0].value))))
    if count == 2 and rng.random() < 0.35:
        return words.opened(_with_two_values(rng, tool, *(shown(one.value) for one in tool.parameters)))
    link = rng.choice([" ", " ", " ", " = ", ": "])
    known = [one.name.replace("_", " ") + link + shown(one.value) for one in tool.parameters]
    if rng.random() < 0.15:
        rng.shuffle(known)
    named = known[0] if len(known) == 1 else f"{', '.join(known[:-1])} and {known[-1]}"
    lead = rng.choice(["call {}", "use {}", "run {}", "please call {}", "use the tool {}"]).format(tool.name)
    if rng.random() < 0.6:
        lead = rng.choice(["", "", "please ", "I want to "]) + tool.phrase
    return words.opened(f"{lead} with {named}") + rng.choice(["", "."])


def _with_one_value(rng: Random, tool: MadeUp, value: str) -> str:
    link, late = rng.choice(_LINKS), rng.choice(["", "", "", " today", " now", " please"])
    forms = [f"{tool.phrase} {link} {value}{late}", f"can you {tool.phrase} {link} {value}{late}?"]
    forms += [f"{tool.verb} {value}", f"{tool.verb} {link} {value}", f"{tool.phrase} {value}"]
    if tool.noun:
        forms += [f"{rng.choice(['what', 'how', 'where'])} is the {tool.noun} {link} {value}{late}?"] * 3
        forms += [
            f"{rng.choice(['where', 'what'])} is my {tool.noun} {value}{late}?",
            f"{tool.noun} {link} {value}",
        ]
        forms += [f"{tool.verb} a {tool.noun} {link} {value}{late}", f"{tool.verb} my {tool.noun} {value}"]
        forms += [f"{tool.verb} a {tool.noun} {link} {value} {tool.parameters[0].name.replace('_', ' ')}"]
    return rng.choice(forms)


def _with_two_values(rng: Random, tool: MadeUp, one: str, other: str) -> str:
    """Two values in the order of the parameters, the second one named at most."""
    first, second, named = rng.choice(_LINKS), rng.choice(_LINKS), tool.parameters[1].name.replace("_", " ")
    what = rng.choice([tool.phrase, f"{tool.verb} a {tool.noun}" if tool.noun else tool.verb])
    end = rng.choice([f"{second} {other}", f"{second} {other} {named}", f"{second} {named} {other}"])
    return rng.choice([f"{what} {first} {one} {end}", f"{tool.verb} {one} {end}"])


def shown(value: Value) -> str:
    """A value as people write it."""
    return json.dumps(value) if isinstance(value, bool) else str(value)


def result(rng: Random) -> tuple[str, str]:
    """What a tool gives back, and what the model tells the user about it."""
    form = rng.random()
    if form < 0.3:
        text = " ".join(words.word(rng) for _ in range(rng.randint(1, 5)))
        return text, f"The answer is {text}."
    if form < 0.4:
        trouble = f"{words.word(rng)} not found"
        return json.dumps({"error": trouble}), f"That did not work: {trouble}."
    keys = {tools.key(rng) for _ in range(rng.choice([1, 1, 2]))}
    values = {one: phrases.number(rng, 4) if rng.random() < 0.4 else words.word(rng) for one in sorted(keys)}
    told = " and ".join(f"the {key.replace('_', ' ')} is {value}" for key, value in values.items())
    return json.dumps(values), words.opened(told) + "."


def talk(rng: Random) -> tuple[str, list[Message], list[Tool]]:
    """A conversation with tools: called or not needed, one call or two, the result told or not yet there."""
    made = [tools.make(rng) for _ in range(rng.choice([1, 1, 1, 2, 2, 3]))]
    offered = [one.schema(rng) for one in made]
    if rng.random() < 0.2:
        _, question, answer = tasks.ask(rng, task=tasks.drawn(rng, chance=False))
        return "tools, no call", [phrases.user(question), phrases.assistant(answer)], offered
    called = [rng.choice(made)]
    if called[0].parameters and rng.random() < 0.15:
        called += [rng.choice(made).again(rng)]
    question = rng.choice([" and then ", " and ", ", then "]).join(
        request(rng, one).rstrip(".") for one in called
    )
    calls = [one.call(number) for number, one in enumerate(called)]
    name = "tools, one call" if len(calls) == 1 else "tools, two calls"
    messages = [phrases.user(question), {"role": "assistant", "content": None, "tool_calls": calls}]
    if rng.random() < 0.25:
        results = [result(rng) for _ in calls]
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": given}
            for call, (given, _) in zip(calls, results, strict=True)
        ]
        messages += [phrases.assistant(" ".join(told for _, told in results))]
        name = "tools, result"
    return name, messages, offered
