"""Many things told at once and all asked for: look-up by name, as densely as it can be practised.

Facts, variables and lists of objects rest on one act: find the place where a name stands and say
what follows it. A lesson that asks one question a turn spends its tokens on the frame of the turn;
here every few tokens are another look-up.
"""

import random
from typing import TypeVar

from train_nano.reading import FORMS, KINDS, SETTINGS, WORD_KINDS
from train_nano.scenes import COLOURS, NUM_COLUMNS, SHAPES
from train_nano.talk import Reply, Turn
from train_nano.words import Words

T = TypeVar("T")


def recall_turn(words: Words, draw: random.Random, most: int = 10) -> Turn:
    """Two to `most` pairs told, then all or some of them asked for in another order."""
    kind = draw.random()
    count = draw.randint(2, most)
    if kind < 0.40:
        return _facts(words, draw, count)
    if kind < 0.85:
        return _variables(words, draw, count)
    return _objects(draw, min(count, 6))


def _facts(words: Words, draw: random.Random, count: int) -> Turn:
    values: dict[tuple[str, str], str] = {}
    names = [words.name() for _ in range(max(2, count * 2 // 3))]
    while len(values) < count:
        key = (draw.choice(KINDS), draw.choice(names))
        values.setdefault(key, words.noun() if key[0] in WORD_KINDS else words.digits(2, 5))
    told = " ".join(
        draw.choice(FORMS).replace("{k}", k).replace("{n}", n).replace("{v}", v)
        for (k, n), v in values.items()
    )
    asked = _shuffled(list(values), draw)
    joined = ", ".join(f"the {k} of {n}" for k, n in asked)
    said = ", ".join(f"{k} of {n} is {values[k, n]}" for k, n in asked)
    return _turn(f"{told} Tell me {joined}.", said, [values[key] for key in asked])


def _variables(words: Words, draw: random.Random, count: int) -> Turn:
    pool = list("abcdefghijkmnpqrstuvwxyz")
    if draw.random() < 0.4:
        pool = [words.noun() for _ in range(12)]
    names = draw.sample(sorted(set(pool)), max(2, count // 2))
    values: dict[str, str] = {}
    told: list[str] = []
    for _ in range(count):
        name = draw.choice(names)
        values[name] = words.value()
        form = draw.choice(SETTINGS)
        told.append(form.replace("{n}", name).replace("{v}", values[name]))
    asked = _shuffled(list(values), draw)
    text = f"{', '.join(told)}. What are {', '.join(asked)}?"
    said = ", ".join(f"{n} = {values[n]}" for n in asked)
    return _turn(text, f"so {said}", [values[n] for n in asked])


def _objects(draw: random.Random, count: int) -> Turn:
    places: dict[str, int] = {}
    while len(places) < count:
        name = f"{draw.choice(list(COLOURS))} {draw.choice(SHAPES)}"
        places.setdefault(name, draw.randrange(NUM_COLUMNS))
    told = ", ".join(f"{i} {name} {at}" for i, (name, at) in enumerate(places.items(), start=1))
    asked = _shuffled(list(places), draw)
    said = ", ".join(f"{name} {places[name]}" for name in asked)
    text = f"There is {told}. Where is the {', the '.join(asked)}?"
    return _turn(text, said, [str(places[name]) for name in asked])


def _turn(text: str, said: str, values: list[str]) -> Turn:
    answer = ", ".join(values)
    return Turn("recall", text, (Reply(answer, said, answer),))


def _shuffled(keys: list[T], draw: random.Random) -> list[T]:
    return draw.sample(keys, len(keys))
