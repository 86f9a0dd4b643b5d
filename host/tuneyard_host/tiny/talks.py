"""Tasks of knowing, reading, talking and telling, and the choices whose answer is a matter of chance."""

from random import Random

from tuneyard_host.tiny import phrases, words
from tuneyard_host.tiny.phrases import Turn

UNKNOWN = "I do not know."


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
    return phrases.polite(rng, rng.choice(asks).format(about)), f"{opening} {middle} {turn} {end}"


def guess(rng: Random) -> Turn:
    options = rng.sample(["yes", "no", "maybe"], 3 if rng.random() < 0.8 else 2)
    shown = phrases.listed(rng, options, last=rng.choice(["or", "or", "or", ""]))
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
    shown = phrases.listed(rng, options, last=rng.choice(["or", "or", "and", ""]))
    ask = rng.choice([
        "Choose one of these words: {}", "Pick one: {}", "Choose: {}", "Choose one: {}", "Pick a word: {}",
        "Which do you like: {}?", "Choose between {}", "Say one of: {}", "Answer with one of {}",
        "Pick one of these: {}",
    ])  # fmt: skip
    return ask.format(shown), rng.choice(options)
