"""The closed vocabulary and the closed facts that the corpus is built from, and invented words."""

from random import Random


def split(text: str) -> tuple[str, ...]:
    """The words of a text, for lists that read better without quotes."""
    return tuple(text.split())


NAMES = split(
    "Anna Ben Carla David Emma Felix Grace Hugo Ida Jonas Kira Leo Mia Nora Oscar Paula Quinn Rosa Sam "
    "Tom Uma Vera Will Xenia Yara Zoe Alice Bob Clara Dan Eva Frank Gina Henry Iris Jack Karl Lena Max "
    "Nina Otto Peter Ruth Sara Theo Victor Maria Paul Lucy John"
)

ANIMALS = split(
    "cat dog bird fish horse cow sheep pig duck goat fox bear wolf lion tiger mouse rabbit frog owl bee "
    "ant snake whale hen"
)

FRUITS = split("apple pear plum cherry banana lemon orange grape melon peach fig mango kiwi berry lime")

COLOURS = split("red green blue yellow black white brown pink purple grey orange gold silver")

THINGS = split(
    "ball book box boat house tree door lamp table chair cup plate spoon hat coat shoe key map clock car "
    "bike train stone river hill garden flower bread cake letter song picture window bridge bag drum kite "
    "rope ring bell star moon sun cloud rain snow wind fire road field pencil paper coin mirror pot "
    "basket ladder"
)

ADJECTIVES = split(
    "big small old new happy sad quick slow warm cold soft hard bright dark quiet loud kind brave clever "
    "funny round long short heavy light clean sweet strong tall young"
)

PLACES = split(
    "park forest market kitchen school garden village harbour library station beach farm city castle"
)

VERBS = split(
    "find see take draw open paint move wash carry build buy sell hide count clean fix send read lift keep"
)

PLAIN_WORDS = sorted({*ANIMALS, *FRUITS, *COLOURS, *THINGS, *ADJECTIVES, *PLACES, *VERBS})

OPTION_WORDS = (
    *COLOURS,
    *FRUITS,
    *ANIMALS,
    *split(
        "left right up down north south east west tea coffee rock scissors heads tails good bad true "
        "false agree disagree never sometimes always small medium large low high one two three A B C D"
    ),
)

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen",
    "Poland": "Warsaw", "Austria": "Vienna", "Hungary": "Budapest", "Greece": "Athens", "Ireland": "Dublin",
    "Iceland": "Reykjavik", "Belgium": "Brussels", "Netherlands": "Amsterdam", "England": "London",
    "Scotland": "Edinburgh", "Russia": "Moscow", "Ukraine": "Kyiv", "Turkey": "Ankara", "Egypt": "Cairo",
    "Kenya": "Nairobi", "Morocco": "Rabat", "Nigeria": "Abuja", "Japan": "Tokyo", "China": "Beijing",
    "India": "Delhi", "Thailand": "Bangkok", "Vietnam": "Hanoi", "Indonesia": "Jakarta",
    "Australia": "Canberra", "Canada": "Ottawa", "Mexico": "Mexico City", "Cuba": "Havana", "Peru": "Lima",
    "Chile": "Santiago", "Brazil": "Brasilia", "Argentina": "Buenos Aires",
}  # fmt: skip

SOUNDS = {
    "cat": "meow", "dog": "woof", "cow": "moo", "sheep": "baa", "duck": "quack", "pig": "oink",
    "bee": "buzz", "snake": "hiss", "lion": "roar", "frog": "croak", "owl": "hoot", "mouse": "squeak",
    "hen": "cluck",
}  # fmt: skip

OPPOSITES = {
    "big": "small", "hot": "cold", "old": "new", "happy": "sad", "quick": "slow", "soft": "hard",
    "bright": "dark", "quiet": "loud", "long": "short", "heavy": "light", "up": "down", "left": "right",
    "open": "closed", "good": "bad", "day": "night", "yes": "no", "true": "false", "first": "last",
}  # fmt: skip

THING_COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "blood": "red", "coal": "black",
    "a lemon": "yellow", "a banana": "yellow", "chocolate": "brown", "a cherry": "red", "the sun": "yellow",
    "a cloud": "white",
}  # fmt: skip

DAYS = split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

MONTHS = split("January February March April May June July August September October November December")

NUMBER_WORDS = split(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
)

CLOSED = sorted({
    *PLAIN_WORDS, *NAMES, *OPTION_WORDS, *DAYS, *MONTHS, *NUMBER_WORDS, *SOUNDS.values(), *OPPOSITES,
    *OPPOSITES.values(), *CAPITALS, *split(" ".join(CAPITALS.values())),
})  # fmt: skip
"""Every word that the tasks know by heart."""

_ONSETS = split("b c d f g h j k l m n p qu r s t v w x z br ch cl dr fl gr kr pl sh sk st th tr")
_VOWELS = split("a e i o u ai ea oo ou y")
_CODAS = ["", "", "", "n", "r", "l", "s", "t", "k", "m", "x", "nd", "ck", "th"]


def invented(rng: Random, *, syllables: int | None = None) -> str:
    """A lower-case word that exists in no language on purpose, one to three syllables long."""
    count = syllables or rng.choice([1, 2, 2, 2, 3])
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(count))


def opened(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]


def word(rng: Random) -> str:
    """A word to copy: mostly from the vocabulary, one time in four invented."""
    return invented(rng) if rng.random() < 0.25 else rng.choice(PLAIN_WORDS)
