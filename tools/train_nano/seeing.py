"""Questions about scenes, with thoughts that name what is seen before the answer is drawn from it.

The full thought lists the objects in reading order, numbered, each with its place from left to
right in tenths of the width, and says again what was asked for: in the order in which a recurrent
model meets them, "the third" is a count, where "the third from the left" would be a sort. What is
known comes before what is asked, so that every answer is a look-up forward in the text. Text-only
twins tell the scene in words.
"""

import random
from dataclasses import dataclass

from k3text.chat_format.conversation import Content, ImagePart, TextPart
from k3text.images.config import ProcessorConfig
from train_nano.scenes import COLOURS, SHAPES, Scene, Thing, picture, random_scene
from train_nano.talk import Picture, Reply, Turn

ORDINALS = ("first", "second", "third")
WANTED_SKILLS = (
    "count", "shape", "shape", "colour", "colour", "left_right", "left_right", "left_right",
    "left_of", "count_some", "exists", "exists", "describe",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Question:
    """A question about one scene.

    Attributes:
        skill: what it tries.
        text: the question, with {of} where a picture may be named.
        thought: full.
        short_thought: at low effort.
        answer: what is said.
    """

    skill: str
    text: str
    thought: str
    short_thought: str
    answer: str


def ask(skill: str, scene: Scene, draw: random.Random) -> Question | None:
    """A question of one skill, or None if this scene does not allow it."""
    return _ASKERS[skill](scene, draw)


def picture_turns(
    draw: random.Random, config: ProcessorConfig, num_questions: int
) -> tuple[list[Turn], list[Picture]]:
    """Turns about one to three pictures, shown together or one after the other."""
    scenes = [random_scene(draw, config) for _ in range(draw.choice((1, 1, 2, 2, 3)))]
    pictures = [picture(scene, draw) for scene in scenes]
    are_together = draw.random() < 0.5
    turns: list[Turn] = []
    shown = 0
    while len(turns) < num_questions:
        new = 0
        if shown < len(scenes) and (turns == [] or draw.random() < 0.5):
            new = len(scenes) if are_together else 1
        target = draw.randrange(shown + new)
        if new == 1 and draw.random() < 0.6:
            target = shown
        is_new = target >= shown
        shown_now = shown + new
        question = _any_question(scenes[target], draw)
        reference, mark = _reference(target, shown_now, new == 1 and is_new, draw)
        content: list[TextPart | ImagePart] = [ImagePart(index=shown + i) for i in range(new)]
        content.append(TextPart(text=named(question.text, reference)))
        skill = question.skill if is_new else "earlier_picture"
        turns.append(turn(skill, tuple(content), question, mark))
        shown = shown_now
    return turns, pictures[:shown]


def told_turns(draw: random.Random, config: ProcessorConfig, num_questions: int) -> list[Turn]:
    """The same questions about a scene told in words: cheap, and the same reasoning."""
    scene = random_scene(draw, config)
    told = _joined([f"{_article(_words(t))} at {scene.column(t)}" for t in scene.things])
    turns: list[Turn] = []
    for index in range(num_questions):
        question = _any_question(scene, draw)
        text = named(question.text, "")
        text = f"There is {told}. {text}" if index == 0 else text
        turns.append(turn("told_scene", text, question, ""))
    return turns


def _any_question(scene: Scene, draw: random.Random) -> Question:
    while True:
        question = ask(draw.choice(WANTED_SKILLS), scene, draw)
        if question is not None:
            return question


def turn(skill: str, content: Content, question: Question, mark: str) -> Turn:
    """A question put to the model; `mark` opens the thought, naming the picture."""
    thought = f"{mark}{question.thought}"
    return Turn(skill, content, (Reply(question.answer, thought, question.short_thought),))


def _reference(target: int, shown: int, is_only_new: bool, draw: random.Random) -> tuple[str, str]:
    """How a question names its picture, and how the thought does."""
    if shown == 1:
        return draw.choice((" in the picture", " in this picture", " in the image", "")), ""
    mark = f"Picture {target + 1}: "
    if is_only_new and draw.random() < 0.5:
        return draw.choice((" in this picture", " in the new picture", " here")), mark
    noun = draw.choice(("picture", "image"))
    if draw.random() < 0.7:
        return f" in the {ORDINALS[target]} {noun}", mark
    return f" in {noun} {target + 1}", mark


def named(text: str, reference: str) -> str:
    """A question's text with its picture named, or not, if the reference is empty."""
    if not reference:
        # "What is?" asks nothing.
        text = text.replace("What is{of}?", "Describe it.")
    return text.replace("{of}", reference)


def _listed(scene: Scene, shape_first: bool = False) -> str:
    return ", ".join(
        f"{index} {_words(thing, shape_first)} {scene.column(thing)}"
        for index, thing in enumerate(scene.things, start=1)
    )


def _placed(scene: Scene, thing: Thing) -> str:
    return f"{_words(thing)} {scene.column(thing)}"


def _words(thing: Thing, shape_first: bool = False) -> str:
    words = (thing.shape, thing.colour) if shape_first else (thing.colour, thing.shape)
    return " ".join(words)


def _article(words: str) -> str:
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"


def _joined(named: list[str]) -> str:
    return named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"


def _sentence(things: tuple[Thing, ...]) -> str:
    text = _joined([_article(_words(thing)) for thing in things])
    return f"{text[0].upper()}{text[1:]}."


def _count(scene: Scene, draw: random.Random) -> Question:
    text = draw.choice(
        ("How many shapes are there{of}?", "How many objects are there{of}?",
         "Count the shapes{of}.", "How many shapes do you see{of}?")
    )  # fmt: skip
    number = str(len(scene.things))
    return Question("count", text, _listed(scene), number, number)


def _count_some(scene: Scene, draw: random.Random) -> Question:
    by_colour = draw.random() < 0.5
    pool = list(COLOURS) if by_colour else list(SHAPES)
    held = [t.colour if by_colour else t.shape for t in scene.things]
    kind = draw.choice(held) if draw.random() < 0.85 else draw.choice(pool)
    found = [t for t in scene.things if kind in (t.colour, t.shape)]
    others = ", ".join(
        f"{index} {t.shape if by_colour else t.colour}" for index, t in enumerate(found, start=1)
    )
    noun = f"{kind} shapes" if by_colour else f"{kind}s"
    number = str(len(found))
    thought = f"{_listed(scene, not by_colour)}. {kind}: {others or '0'}"
    text = draw.choice(("How many {n} are there{of}?", "Count the {n}{of}.")).replace("{n}", noun)
    return Question("count_some", text, thought, f"{kind}: {others or '0'}", number)


def _shape(scene: Scene, draw: random.Random) -> Question | None:
    thing = _unique(scene, draw, by_colour=True)
    if thing is None:
        return None
    text = draw.choice(
        ("What shape is the {c} one{of}?", "Which shape is {c}{of}?", "What is {c}{of}?")
    ).replace("{c}", thing.colour)
    found = _words(thing)
    return Question("shape", text, f"{_listed(scene)}. {found}", found, thing.shape)


def _colour(scene: Scene, draw: random.Random) -> Question | None:
    thing = _unique(scene, draw, by_colour=False)
    if thing is None:
        return None
    spelt = draw.choice(("colour", "colour", "color"))
    text = draw.choice(("What {k} is the {s}{of}?", "Which {k} has the {s}{of}?"))
    text = text.replace("{k}", spelt).replace("{s}", thing.shape)
    found = _words(thing, True)
    return Question("colour", text, f"{_listed(scene, True)}. {found}", found, thing.colour)


def _left_right(scene: Scene, draw: random.Random) -> Question | None:
    if len(scene.things) < 2:
        return None
    first, second = draw.sample(scene.things, 2)
    a, b = _words(first), _words(second)
    text = draw.choice(
        ("Is the {a} left or right of the {b}{of}?",
         "Is the {a} to the left or to the right of the {b}{of}?")
    ).replace("{a}", a).replace("{b}", b)  # fmt: skip
    places = f"{_placed(scene, first)}, {_placed(scene, second)}"
    answer = "left" if first.x < second.x else "right"
    return Question("left_right", text, f"{_listed(scene)}. {places}", places, answer)


def _left_of(scene: Scene, draw: random.Random) -> Question | None:
    is_left = draw.random() < 0.5
    things = sorted(scene.things, key=lambda thing: thing.x, reverse=not is_left)
    place = draw.randrange(min(2, len(things)))
    thing = things[place]
    answer = _article(_words(things[0])) if place else "nothing"
    side = "left" if is_left else "right"
    text = draw.choice(("What is {d} of the {a}{of}?", "What is to the {d} of the {a}{of}?"))
    text = text.replace("{d}", side).replace("{a}", _words(thing))
    order = ", ".join(f"{scene.column(other)} {_words(other)}" for other in things)
    return Question("left_of", text, f"{_listed(scene)}. {side}: {order}", order, answer)


def _exists(scene: Scene, draw: random.Random) -> Question:
    if draw.random() < 0.5:
        thing = draw.choice(scene.things)
        colour, shape = thing.colour, thing.shape
    else:
        colour, shape = draw.choice(list(COLOURS)), draw.choice(SHAPES)
    found = [t.shape for t in scene.things if t.colour == colour]
    answer = "yes" if shape in found else "no"
    # All of its colour first: whether a pair stands in a list is not one look.
    thought = f"{colour}: {', '.join(found) or '0'}. {shape}"
    text = draw.choice(("Is there {a}{of}?", "Do you see {a}{of}?"))
    text = text.replace("{a}", _article(f"{colour} {shape}"))
    return Question("exists", text, f"{_listed(scene)}. {thought}", thought, answer)


def _describe(scene: Scene, draw: random.Random) -> Question:
    text = draw.choice(("What is there{of}?", "What do you see{of}?", "What is{of}?"))
    listed = _listed(scene)
    return Question("describe", text, listed, listed, _sentence(scene.things))


def _unique(scene: Scene, draw: random.Random, *, by_colour: bool) -> Thing | None:
    keys = [t.colour if by_colour else t.shape for t in scene.things]
    found = [t for t, key in zip(scene.things, keys, strict=True) if keys.count(key) == 1]
    return draw.choice(found) if found else None


_ASKERS = {
    "count": _count,
    "count_some": _count_some,
    "shape": _shape,
    "colour": _colour,
    "left_right": _left_right,
    "left_of": _left_of,
    "exists": _exists,
    "describe": _describe,
}
