"""Facts to be found in long text, and variables that change in a conversation."""

import random
from dataclasses import dataclass

from train_nano.talk import Reply, Turn
from train_nano.words import Words

WORD_KINDS = ("password", "secret", "word")
KINDS = ("code", "number", "phone", "room", "key", *WORD_KINDS)
"""None ends another, or a question for the one would also name the other."""

FORMS = (
    "The {k} of {n} is {v}.",
    "Remember: the {k} of {n} is {v}.",
    "Note that the {k} of {n} is {v}.",
    "By the way, the {k} of {n} is {v}.",
)
"""A fact's words in the order in which the thought says them again: kind, name, value."""

SETTINGS = ("{n} = {v}", "now {n} = {v}", "set {n} = {v}", "let {n} = {v}")
"""How a variable is set."""

QUESTIONS = ("What is the {k} of {n}?", "Tell me the {k} of {n}.", "What is {n}'s {k}?")


@dataclass(frozen=True, slots=True)
class Fact:
    """Something to be found again."""

    kind: str
    name: str
    value: str


def fact_turns(
    words: Words, draw: random.Random, num_facts: int, filler_characters: int, num_questions: int
) -> list[Turn]:
    """A long message with facts strewn into filler, then questions about them.

    Args:
        words: where names, values and sentences come from.
        draw: where chance comes from.
        num_facts: told.
        filler_characters: about as much text around them.
        num_questions: asked, each about a fact of its own while there are any; now and then
            about one that was not told.
    """
    facts = _facts(words, draw, num_facts)
    sentences: list[str] = []
    size = 0
    while size < filler_characters:
        sentences.append(words.sentence())
        size += len(sentences[-1]) + 1
    for fact in facts:
        form = draw.choice(FORMS)
        text = form.replace("{k}", fact.kind).replace("{n}", fact.name).replace("{v}", fact.value)
        sentences.insert(draw.randint(0, len(sentences)), text)
    told = " ".join(sentences)
    asked = draw.sample(facts, min(num_questions, len(facts)))
    told_names = {fact.name for fact in facts}
    turns = [_question(fact, told_names, words, draw) for fact in asked]
    if draw.random() < 0.7:
        first = turns[0]
        turns[0] = Turn(first.skill, f"{told} {first.content}", first.replies)
    else:
        turns.insert(0, Turn("noted", told, (Reply("Noted.", "facts", ""),)))
    return turns


def variable_turns(words: Words, draw: random.Random, num_turns: int) -> list[Turn]:
    """Variables set, changed and asked for, turn by turn."""
    names = draw.sample("abcdefghijkmnpqrstuvwxyz", draw.randint(2, 4))
    if draw.random() < 0.4:
        names = list(dict.fromkeys(words.noun() for _ in names))
    values: dict[str, str] = {}
    turns: list[Turn] = []
    while len(turns) < num_turns:
        if not values or draw.random() < 0.45:
            text = _assignments(names, values, words, draw)
            # All that holds, so that the latest of these answers is enough to look at.
            said = ", ".join(f"{name} = {value}" for name, value in values.items())
            turns.append(Turn("noted", text, (Reply(f"OK: {said}.", "set", ""),)))
            continue
        name = draw.choice(sorted(values))
        text = draw.choice(
            ("What is {n}?", "What is the value of {n}?", "Tell me {n}.", "What is {n} now?")
        )
        value = values[name]
        # A name that opens a text is another token than one behind a space, and would rather
        # find any other name that opens a message.
        reply = Reply(value, f"so {name} = {value}", value)
        turns.append(Turn("variable", text.replace("{n}", name), (reply,)))
    return turns


def _assignments(
    names: list[str], values: dict[str, str], words: Words, draw: random.Random
) -> str:
    """A message that sets some variables; their values are changed."""
    texts: list[str] = []
    for name in draw.sample(names, draw.randint(1, min(3, len(names)))):
        value = words.value()
        form = draw.choice(SETTINGS)
        texts.append(form.replace("{n}", name).replace("{v}", value))
        values[name] = value
    return draw.choice((", ", "; ", " and ")).join(texts) + "."


def _facts(words: Words, draw: random.Random, count: int) -> list[Fact]:
    facts: dict[tuple[str, str], Fact] = {}
    while len(facts) < count:
        kind, name = draw.choice(KINDS), words.name()
        value = words.noun() if kind in WORD_KINDS else words.digits(2, 5)
        facts.setdefault((kind, name), Fact(kind, name, value))
    return list(facts.values())


def _question(fact: Fact, told_names: set[str], words: Words, draw: random.Random) -> Turn:
    text = draw.choice(QUESTIONS)
    if draw.random() < 0.06:
        name = _name_not_in(told_names, words)
        reply = Reply("I do not know.", f"{fact.kind} of {name} is not told", "not told")
        return Turn("unknown_fact", text.replace("{k}", fact.kind).replace("{n}", name), (reply,))
    text = text.replace("{k}", fact.kind).replace("{n}", fact.name)
    reply = Reply(fact.value, f"{fact.kind} of {fact.name} is {fact.value}", fact.value)
    return Turn("needle", text, (reply,))


def _name_not_in(told_names: set[str], words: Words) -> str:
    """A name of any sort: were it always an invented one, being invented would mean not told."""
    while True:
        name = words.name()
        if name not in told_names:
            return name
