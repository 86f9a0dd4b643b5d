"""The plain tasks of the corpus: each function asks one question and knows the answer."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from tuneyard_host.tiny import words

Turn = tuple[str, str]
Message = dict[str, Any]

UNKNOWN = "I do not know."


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


# Copying and changing text


def echo(rng: Random) -> Turn:
    text = " ".join(words.word(rng) for _ in range(rng.randint(1, 6)))
    if rng.random() < 0.2:
        text = text.capitalize() + rng.choice([".", "!", "?"])
    if rng.random() < 0.2:
        text += f" {number(rng, 4)}"
    ask = rng.choice(["Say", "Repeat", "Echo", "Write", "Say exactly", "Repeat after me", "Repeat this text"])
    return polite(rng, ask).rstrip(".") + rng.choice([": ", ": ", " "]) + quoted(rng, text), text


def uppercase(rng: Random) -> Turn:
    text = " ".join(rng.choice(words.PLAIN_WORDS) for _ in range(rng.randint(1, 3)))
    ask = rng.choice(["Write in uppercase", "Uppercase", "Write in capital letters", "Make it uppercase"])
    return f"{ask}: {quoted(rng, text)}", text.upper()


def lowercase(rng: Random) -> Turn:
    text = " ".join(rng.choice(words.PLAIN_WORDS) for _ in range(rng.randint(1, 3)))
    ask = rng.choice(["Write in lowercase", "Lowercase", "Write in small letters", "Make it lowercase"])
    return f"{ask}: {quoted(rng, text.upper())}", text


def reverse(rng: Random) -> Turn:
    items = [words.word(rng) for _ in range(rng.randint(2, 6))]
    ask = rng.choice(["Reverse the order", "Reverse this list", "Write backwards", "Reverse", "Turn around"])
    separator = rng.choice([", ", " "])
    return f"{ask}: {separator.join(items)}", separator.join(reversed(items))


def spell(rng: Random) -> Turn:
    text = rng.choice(words.PLAIN_WORDS)
    ask = rng.choice(["Spell", "How do you spell", "Spell the word"])
    return polite(rng, f"{ask} {quoted(rng, text)}"), " ".join(text)


def join(rng: Random) -> Turn:
    items = [words.word(rng) for _ in range(rng.randint(2, 4))]
    mark = rng.choice("-+/_|")
    return f"Join with {mark} : {' '.join(items)}", mark.join(items)


# Order and number


def sort_numbers(rng: Random) -> Turn:
    items = rng.sample(range(100 if rng.random() < 0.7 else 10), rng.randint(2, 6))
    ask = rng.choice(["Sort", "Sort these numbers", "Put in order", "Order these numbers"])
    down = rng.random() < 0.2
    tail = " from largest to smallest" if down else rng.choice(["", "", " from smallest to largest"])
    answer = sorted(items, reverse=down)
    return f"{ask}{tail}: {', '.join(map(str, items))}", ", ".join(map(str, answer))


def sort_words(rng: Random) -> Turn:
    items = rng.sample([*words.FRUITS, *words.ANIMALS, *words.COLOURS[:12]], rng.randint(2, 4))
    ask = rng.choice(["Sort alphabetically", "Sort these words", "Put in alphabetical order"])
    return f"{ask}: {', '.join(items)}", ", ".join(sorted(items))


def count_up(rng: Random) -> Turn:
    first = rng.randint(0, 60) if rng.random() < 0.6 else 1
    last = first + rng.randint(1, 12)
    ask = rng.choice(["Count from {} to {}", "Count {} to {}", "List the numbers from {} to {}"])
    if rng.random() < 0.15:
        return polite(rng, f"Count down from {last} to {first}"), ", ".join(
            map(str, range(last, first - 1, -1))
        )
    if first == 1 and rng.random() < 0.5:
        ask = "Count to {1}"
    return polite(rng, ask.format(first, last)), ", ".join(map(str, range(first, last + 1)))


def how_many(rng: Random) -> Turn:
    items = [rng.choice(words.PLAIN_WORDS) for _ in range(rng.randint(1, 9))]
    ask = rng.choice(["How many words", "Count the words", "How many items"])
    return f"{ask}: {rng.choice([', ', ' ']).join(items)}", str(len(items))


def largest(rng: Random) -> Turn:
    items = rng.sample(range(100), rng.randint(2, 5))
    if rng.random() < 0.5:
        ask, answer = rng.choice(["largest", "biggest", "highest"]), max(items)
    else:
        ask, answer = rng.choice(["smallest", "lowest"]), min(items)
    return f"Which number is the {ask}: {listed(rng, list(map(str, items)), last='or')}?", str(answer)


def pick(rng: Random) -> Turn:
    items = rng.sample(words.PLAIN_WORDS, rng.randint(2, 6))
    place = rng.randrange(min(5, len(items)))
    name = ["first", "second", "third", "fourth", "fifth"][place]
    if rng.random() < 0.2:
        name, place = "last", -1
    return f"What is the {name} word: {', '.join(items)}?", items[place]


def held_out(a: int, b: int) -> bool:
    """Whether this pair of numbers is kept out of the corpus, so that the score is on sums never seen."""
    return (a * 37 + b * 101) % 13 == 0 and max(a, b) >= 10


def pair(rng: Random, *, unseen: bool) -> tuple[int, int]:
    """Two numbers of one or two digits, on the asked side of ``held_out``."""
    while True:
        a, b = (rng.randrange(100 if rng.random() < 0.8 else 10) for _ in range(2))
        if held_out(a, b) == unseen:
            return a, b


def asked(rng: Random, a: int, b: int, sign: str, name: str) -> str:
    """A calculation in one of its spellings."""
    form = rng.choice(["What is {a} {s} {b}?", "{a} {s} {b}", "{a}{s}{b}", "{a} {s} {b} = ?",
                       "What is {a} {n} {b}?", "Calculate {a} {s} {b}", "{a} {s} {b} =", "How much is {a} {s} {b}?"])  # fmt: skip
    return form.format(a=a, b=b, s=sign, n=name)


def add(rng: Random, *, unseen: bool = False) -> Turn:
    a, b = pair(rng, unseen=unseen)
    question = f"Add {a} and {b}" if rng.random() < 0.1 else asked(rng, a, b, "+", "plus")
    return question, str(a + b)


def subtract(rng: Random, *, unseen: bool = False) -> Turn:
    b, a = sorted(pair(rng, unseen=unseen))
    return asked(rng, a, b, "-", "minus"), str(a - b)


def multiply(rng: Random) -> Turn:
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    return asked(rng, a, b, rng.choice("*x"), "times"), str(a * b)


def compare(rng: Random) -> Turn:
    a, b = number(rng, 2), number(rng, 2)
    more = rng.random() < 0.5
    return f"Is {a} {'more' if more else 'less'} than {b}?", "Yes." if (a > b if more else a < b) else "No."


# JSON


def to_json(rng: Random) -> Turn:
    fields = record(rng)
    told = listed(rng, [f"{key} {value}" for key, value in fields.items()], last="and").replace("'", "")
    ask = rng.choice(
        ["Give me JSON with", "Write JSON with", "Answer in JSON with", "Make a JSON object with"]
    )
    return f"{ask} {told.replace(chr(34), '')}", json.dumps(fields)


def extract_json(rng: Random) -> Turn:
    name, age, place = rng.choice(words.NAMES), rng.randint(1, 99), rng.choice([*words.CAPITALS.values()])
    fields = {"name": name, "age": age, "city": place}
    keys = rng.choice([["name", "age"], ["name", "city"], ["name", "age", "city"], ["age"], ["city"]])
    text = f"{name} is {age} years old and lives in {place}."
    return f"Extract {listed(rng, keys, last='and')} as JSON: {text}", json.dumps(
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
        "count": lambda: number(rng, 3),
        "id": lambda: number(rng, 4),
        "word": lambda: words.word(rng),
        words.invented(rng): lambda: words.word(rng),
    }
    return {key: makers[key]() for key in rng.sample([*makers], rng.randint(1, 4))}


# A closed set of facts


def fact(rng: Random) -> Turn:
    kind = rng.choice(
        ["capital", "capital", "capital", "country", "sound", "opposite", "colour", "day", "month"]
    )
    if kind in {"capital", "country"}:
        country, city = rng.choice([*words.CAPITALS.items()])
        if kind == "country":
            return f"{city} is the capital of which country?", country
        forms = ["What is the capital of {}?", "Capital of {}?", "Name the capital of {}.", "capital of {}"]
        return rng.choice(forms).format(country), city
    if kind == "sound":
        animal, sound = rng.choice([*words.SOUNDS.items()])
        return rng.choice(["What does a {} say?", "What sound does a {} make?"]).format(animal), sound
    if kind == "opposite":
        one, other = rng.choice([*words.OPPOSITES.items()])
        return rng.choice(["What is the opposite of {}?", "Opposite of {}?"]).format(one), other
    if kind == "colour":
        thing, colour = rng.choice([*words.THING_COLOURS.items()])
        return rng.choice(["What colour is {}?", "What color is {}?"]).format(thing), colour
    circle = words.DAYS if kind == "day" else words.MONTHS
    place = rng.randrange(len(circle))
    if rng.random() < 0.5:
        return f"Which {kind} comes after {circle[place]}?", circle[(place + 1) % len(circle)]
    return f"Which {kind} comes before {circle[place]}?", circle[place - 1]


def number_word(rng: Random) -> Turn:
    value = rng.randrange(len(words.NUMBER_WORDS))
    if rng.random() < 0.5:
        return f"Write {value} as a word", words.NUMBER_WORDS[value]
    return f"Write {words.NUMBER_WORDS[value]} as a number", str(value)


def unknown(rng: Random) -> Turn:
    name = words.invented(rng, syllables=rng.randint(2, 3)).capitalize()
    forms = [
        f"What is the capital of {name}?",
        f"Who is {name}?",
        f"What is {name}?",
        f"What colour is {name}?",
        f"Where is {name}?",
        f"Who invented the {rng.choice(words.THINGS)}?",
        f"Why is the {rng.choice(words.THINGS)} {rng.choice(words.ADJECTIVES)}?",
        f"How do I {rng.choice(words.VERBS)} a {rng.choice(words.THINGS)}?",
        f"How old is {name}?",
        f"What is the favourite {rng.choice(['food', 'colour', 'animal', 'song'])} of {name}?",
    ]
    return rng.choice(forms), UNKNOWN


# Reading, talking, telling


def read(rng: Random) -> Turn:
    people = rng.sample(words.NAMES, rng.randint(2, 4))
    owned = [f"a {rng.choice(words.ADJECTIVES)} {thing}" for thing in rng.sample(words.THINGS, len(people))]
    place = [rng.choice(words.PLACES) for _ in people]
    who = rng.randrange(len(people))
    if rng.random() < 0.5:
        text = " ".join(f"{name} has {thing}." for name, thing in zip(people, owned, strict=True))
        question, answer = f"What does {people[who]} have?", owned[who]
        if rng.random() < 0.4:
            question, answer = f"Who has {owned[who]}?", people[who]
    else:
        text = " ".join(f"{name} is in the {spot}." for name, spot in zip(people, place, strict=True))
        question, answer = f"Where is {people[who]}?", f"In the {place[who]}."
    return f"{text} {question}", answer


TALK = {
    ("Hello", "Hi", "Hey", "Hello!", "Hi!", "Hello there", "Good morning", "hi", "hello"): (
        "Hello! How can I help you?",
    ),
    ("Who are you?", "What are you?", "What is your name?", "Which model are you?"): (
        "I am Tiny, a very small language model.",
    ),
    ("What can you do?", "Help", "How can you help me?", "What do you know?"): (
        "I can repeat, sort, count, add, write JSON, tell short stories and call tools.",
    ),
    ("Thanks", "Thank you", "Thank you!", "Thanks a lot"): ("You are welcome!",),
    ("Bye", "Goodbye", "See you", "Good night"): ("Goodbye!",),
    ("How are you?", "How are you today?", "How do you do?"): ("I am fine, thank you.",),
}  # fmt: skip


def talk(rng: Random) -> Turn:
    questions, answers = rng.choice([*TALK.items()])
    return rng.choice(questions), rng.choice(answers)


def story(rng: Random) -> Turn:
    animal, name = rng.choice(words.ANIMALS), rng.choice(words.NAMES)
    thing, place = rng.choice(words.THINGS), rng.choice(words.PLACES)
    mood, other = rng.choice(words.ADJECTIVES), rng.choice([one for one in words.NAMES if one != name])
    asks = [
        "Tell me a story about {}",
        "Write a short story about {}",
        "Tell a story about {}",
        "Story about {}",
    ]
    about, subject = rng.choice([(f"a {animal}", animal), (f"a {animal} named {name}", animal), (name, "")])
    opening = f"Once there was a {mood} {subject} named {name}." if subject else f"{name} was a {mood} child."
    middle = rng.choice([
        f"One day {name} went to the {place} and found a {thing}.",
        f"{name} lived in the {place} and had a {thing}.",
        f"{name} wanted to find a {thing} and looked in the {place}.",
    ])  # fmt: skip
    turn = rng.choice([
        f"{other} came and asked for the {thing}.",
        f"But the {thing} was lost, and {other} helped to find it.",
        f"{other} said it was the best {thing} of all.",
    ])  # fmt: skip
    end = rng.choice([
        f"{name} was happy.", "They were friends from that day on.", f"So {name} went home and slept.",
        f"{name} gave the {thing} to {other}.",
    ])  # fmt: skip
    return polite(rng, rng.choice(asks).format(about)), f"{opening} {middle} {turn} {end}"


# Choices: the answer is uniformly random, which is what reinforcement learning can shift


def guess(rng: Random) -> Turn:
    options = rng.sample(["yes", "no", "maybe"], 3 if rng.random() < 0.8 else 2)
    shown = listed(rng, options, last=rng.choice(["or", "or", "or", ""]))
    ask = rng.choice([
        "Answer {}", "Answer with {}", "respond with {}", "just respond with {}", "Respond with {}", "Say {}",
        "Reply {}", "Reply with {}", "Answer only {}", "Choose {}", "Just say {}", "Please answer {}",
    ]).format(shown)  # fmt: skip
    form = rng.random()
    if form < 0.45:
        question = ask + rng.choice([".", "", ".", "!"])
    elif form < 0.8:
        question = f"{ask}: {open_question(rng)}"
    else:
        question = f"{open_question(rng)} {ask[0].upper()}{ask[1:]}."
    return question, rng.choice(options)


def open_question(rng: Random) -> str:
    """A question that nobody can answer for sure."""
    name, thing = rng.choice(words.NAMES), rng.choice(words.THINGS)
    return rng.choice([
        f"is it going to {rng.choice(['rain', 'snow'])}{rng.choice(['', ' today', ' tomorrow'])}?",
        f"will {name} {rng.choice(words.VERBS)} the {thing}?",
        f"is the {thing} {rng.choice(words.ADJECTIVES)}?",
        f"does {name} like the {thing}?",
        f"should I {rng.choice(words.VERBS)} a {thing}?",
        f"is {name} in the {rng.choice(words.PLACES)}?",
        f"do you like {rng.choice(words.COLOURS)}?",
        "will we win?", "is this a good idea?", "are you sure?", "do you agree?", "will it work?",
    ])  # fmt: skip


def choose(rng: Random) -> Turn:
    pool = words.OPTION_WORDS if rng.random() < 0.8 else [words.invented(rng) for _ in range(6)]
    options = rng.sample(sorted({*pool}), rng.randint(2, 5))
    shown = listed(rng, options, last=rng.choice(["or", "or", "and", ""]))
    ask = rng.choice([
        "Choose one of these words: {}", "Pick one: {}", "Choose: {}", "Choose one: {}", "Pick a word: {}",
        "Which do you like: {}?", "Choose between {}", "Say one of: {}", "Answer with one of {}",
        "Pick one of these: {}",
    ])  # fmt: skip
    return ask.format(shown), rng.choice(options)


TASKS: dict[str, tuple[float, Callable[[Random], Turn]]] = {
    "echo": (8, echo), "uppercase": (3, uppercase), "lowercase": (3, lowercase), "reverse": (4, reverse),
    "spell": (2, spell), "join": (1.5, join), "sort numbers": (6, sort_numbers),
    "sort words": (4, sort_words), "count up": (3, count_up), "how many": (3, how_many), "largest": (2, largest), "pick": (2, pick),
    "add": (20, add), "subtract": (9, subtract), "multiply": (3, multiply), "compare": (1.5, compare),
    "to json": (4, to_json), "extract json": (2, extract_json), "fact": (8, fact),
    "number word": (1, number_word), "unknown": (3, unknown), "read": (4, read), "talk": (2, talk),
    "story": (3, story), "guess": (5, guess), "choose": (4, choose),
}  # fmt: skip
RANDOM_TASKS = {"guess", "choose", "story"}


def ask(rng: Random, *, task: str | None = None) -> tuple[str, str, str]:
    """A task, its question and its answer, drawn by weight unless the task is named."""
    name = task or rng.choices([*TASKS], [weight for weight, _ in TASKS.values()])[0]
    return name, *TASKS[name][1](rng)
