"""Tasks of order and number, and the sums that stay out of the corpus to be asked later."""

from random import Random

from tuneyard_host.tiny import phrases, words
from tuneyard_host.tiny.phrases import Turn


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
        return phrases.polite(rng, f"Count down from {last} to {first}"), ", ".join(
            map(str, range(last, first - 1, -1))
        )
    if first == 1 and rng.random() < 0.5:
        ask = "Count to {1}"
    return phrases.polite(rng, ask.format(first, last)), ", ".join(map(str, range(first, last + 1)))


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
    return f"Which number is the {ask}: {phrases.listed(rng, list(map(str, items)), last='or')}?", str(answer)


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
                       "What is {a} {n} {b}?", "Calculate {a} {s} {b}",
                       "{a} {s} {b} =", "How much is {a} {s} {b}?"])  # fmt: skip
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
    a, b = phrases.number(rng, 2), phrases.number(rng, 2)
    more = rng.random() < 0.5
    return f"Is {a} {'more' if more else 'less'} than {b}?", "Yes." if (a > b if more else a < b) else "No."
