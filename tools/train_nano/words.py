"""Names, words, numbers and filler.

Filler sentences and invented words are dealt to the training or the held-out split by a digest.
Known words are the same in both: a vocabulary this small is learned word by word, and what is
held out is what is said with them. Filler is prose that every Python installation carries: the language reference behind `help()`.
It is read when lessons are made and is no part of a checkpoint.
"""

import hashlib
import random
import re
from collections.abc import Mapping
from functools import lru_cache
from pydoc_data import topics

from train_nano.talk import Split

HELD_OUT_SHARE = 5
"""One sentence or invented word in so many is held out."""

INVENTED: Mapping[Split, float] = {"train": 0.2, "held_out": 0.1}
"""Share of words and names that do not exist: they keep copying general, and are what fails last."""

NUMBERS: Mapping[Split, float] = {"train": 0.5, "held_out": 0.7}
"""Share of variables' values that are numbers. A word is the harder one: a number's first token,
a space, can be guessed and gives a token's time to look for the rest."""

NAMES: Mapping[Split, float] = {"train": 0.65, "held_out": 0.4}
"""Share of tools' arguments that are names. A name that opens a value is a token that stands
nowhere else, so each has to be met often."""

_ONSETS = "b c d f g h j k l m n p r s t v w z br dr gr kl pl st tr sh th"
_VOWELS = "a e i o u ai ea io"
_CODAS = ["", "", "n", "r", "l", "s", "x", "m", "nd", "rk"]

_NOUNS = """apple river garden window bridge castle forest hammer island jacket kettle ladder market
needle orange pencil rabbit school ticket valley wagon anchor basket candle dragon engine feather
guitar harbor insect jungle kitchen lemon mirror nation office palace queen rocket silver temple
umbrella village winter yellow zebra animal bottle camera desert eagle flower ghost honey iron
jewel king lamp moon nest ocean paper quilt road star tree urn violin water bread cloud door egg
fire glass hill ice judge key leaf milk night oil plane rain sand table uncle voice wheel yard
book chair clock coat cup desk dish fish gate hand horse house lake letter map mouse music name
note park phone plant plate pool rope rose salt ship shoe shop snow song soup spoon stone street
sugar sun tail tea toy train wall wind wine wolf wood"""

_PLACES = """Paris London Berlin Madrid Rome Vienna Prague Oslo Dublin Lisbon Athens Cairo Delhi
Tokyo Seoul Lima Quito Boston Denver Austin Dallas Miami Toronto Sydney Perth Nairobi Lagos Accra
Tunis Riga Vilnius Warsaw Zagreb Sofia Bern Geneva Munich Hamburg Lyon Porto Seville Naples Turin
Kyoto Osaka Hanoi Manila Jakarta Bogota Havana"""

_PEOPLE = """Anna Ben Clara David Emma Felix Grace Henry Iris Jack Karen Leo Maria Noah Olga Peter
Quinn Rosa Simon Tina Ursula Victor Wendy Xavier Yara Zoe Alice Bruno Carlos Diana Erik Fiona
George Hanna Ivan Julia Kevin Laura Martin Nina Oscar Paula Robert Sarah Thomas Vera Walter"""


NOUNS, PLACES, PEOPLE = _NOUNS.split(), _PLACES.split(), _PEOPLE.split()


def is_held_out(item: str) -> bool:
    """Whether an item belongs to the held-out split; the same on every machine."""
    return hashlib.sha256(item.encode()).digest()[0] % HELD_OUT_SHARE == 0


class Words:
    """Draws from one split."""

    def __init__(self, split: Split, draw: random.Random) -> None:
        self._is_held_out = split == "held_out"
        self._invented = INVENTED[split]
        self._numbers = NUMBERS[split]
        self._names = NAMES[split]
        self._draw = draw

    def noun(self) -> str:
        """A common noun, or now and then a word that does not exist."""
        return self._draw.choice(NOUNS) if self._draw.random() > self._invented else self.invented()

    def name(self) -> str:
        """A person's or place's name, known or invented, capitalised."""
        kind = self._draw.random()
        if kind < self._invented:
            return self.invented().capitalize()
        return self._draw.choice(PEOPLE if kind < 0.6 else PLACES)

    def invented(self) -> str:
        """A pronounceable word of two or three syllables that means nothing."""
        while True:
            syllables = (
                self._draw.choice(_ONSETS.split()) + self._draw.choice(_VOWELS.split())
                for _ in range(self._draw.choice((2, 2, 2, 3)))
            )
            word = "".join(syllables) + self._draw.choice(_CODAS)
            if is_held_out(word) == self._is_held_out:
                return word

    def digits(self, low: int = 1, high: int = 5) -> str:
        """A number of `low` to `high` digits without leading zeros."""
        length = self._draw.randint(low, high)
        first = "123456789" if length > 1 else "0123456789"
        rest = (self._draw.choice("0123456789") for _ in range(length - 1))
        return self._draw.choice(first) + "".join(rest)

    def value(self) -> str:
        """A variable's value: a number of up to three digits, or a noun."""
        is_number = self._draw.random() < self._numbers
        return self.digits(1, 3) if is_number else self.noun()

    def argument(self) -> str:
        """A tool's argument: a name, a phrase or, seldom, a number."""
        if self._draw.random() < self._names:
            return self.name()
        return self.phrase() if self._draw.random() < 0.75 else self.digits(1, 5)

    def phrase(self) -> str:
        """One to three words, as a value of an argument."""
        return " ".join(self.noun() for _ in range(self._draw.choice((1, 1, 2, 3))))

    def sentence(self) -> str:
        """A sentence of filler."""
        return self._draw.choice(_sentences(self._is_held_out))


@lru_cache
def _sentences(held_out: bool) -> list[str]:
    found = (
        " ".join(piece.split())
        for text in topics.topics.values()
        for piece in re.split(r"(?<=[.!?])\s+(?=[A-Z])|\n\n+", text)
    )
    plain = (s for s in found if 30 <= len(s) <= 200 and s.endswith(".") and s[0].isalpha())
    return sorted(s for s in set(plain) if is_held_out(s) == held_out)
