"""Held-out questions, one skill each, as the evaluation asks them: fresh conversations."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from k3text.chat_format.conversation import ImagePart, TextPart
from train_nano import acting, chatting, reading, seeing
from train_nano.lessons import Lessons
from train_nano.scenes import picture, random_scene
from train_nano.talk import Mode, Talk, Turn
from train_nano.words import Words


@dataclass(frozen=True, slots=True)
class Skill:
    """Something that is measured.

    Attributes:
        make: a talk whose last reply is the answer that is wanted.
        num_probes: asked in a full evaluation.
        target: accuracy to be reached, or None for a figure that is only told.
        mode: how much is thought.
    """

    make: Callable[[Lessons, random.Random], Talk]
    num_probes: int
    target: float | None
    mode: Mode = "max"


def _one_picture(skill: str) -> Callable[[Lessons, random.Random], Talk]:
    def make(lessons: Lessons, draw: random.Random) -> Talk:
        while True:
            scene = random_scene(draw, lessons.config)
            question = seeing.ask(skill, scene, draw)
            if question is not None:
                break
        content = (
            ImagePart(index=0),
            TextPart(text=seeing.named(question.text, " in the picture")),
        )
        turn = seeing.turn(skill, content, question, "")
        return Talk((turn,), (picture(scene, draw),))

    return make


def _earlier_picture(lessons: Lessons, draw: random.Random) -> Talk:
    while True:
        turns, pictures = seeing.picture_turns(draw, lessons.config, 4)
        if turns[-1].skill == "earlier_picture":
            return Talk(tuple(turns), tuple(pictures))


def _needle(characters: int, num_facts: int) -> Callable[[Lessons, random.Random], Talk]:
    def make(lessons: Lessons, draw: random.Random) -> Talk:
        while True:
            talk = lessons.needle(draw, characters, num_facts, 1)
            if talk.turns[-1].skill == "needle":
                return replace(talk, system="")

    return make


def _variable(lessons: Lessons, draw: random.Random) -> Talk:
    words = Words(lessons.split, draw)
    while True:
        turns = reading.variable_turns(words, draw, draw.randint(3, 7))
        if turns[-1].skill == "variable":
            return Talk(tuple(turns))


def _called(*, with_result: bool) -> Callable[[Lessons, random.Random], Talk]:
    def make(lessons: Lessons, draw: random.Random) -> Talk:
        words = Words(lessons.split, draw)
        tools = acting.random_tools(words, draw)
        turn = acting.call_turn(tools, words, draw, with_result=with_result)
        before = (
            (acting.call_turn(tools, words, draw, with_result=True),) if draw.random() < 0.3 else ()
        )
        return Talk((*before, turn), tools=tuple(tool.declaration() for tool in tools))

    return make


def _refused(lessons: Lessons, draw: random.Random) -> Talk:
    words = Words(lessons.split, draw)
    tools = acting.random_tools(words, draw)
    declared = tuple(tool.declaration() for tool in tools)
    turn = acting.refused_turn(tools, words, draw)
    return Talk((turn,), tools=declared, tool_choice="none")


def _json(lessons: Lessons, draw: random.Random) -> Talk:
    turn, wanted = chatting.json_turn(Words(lessons.split, draw), draw)
    return Talk((turn,), response_format=wanted)


def _unknown(lessons: Lessons, draw: random.Random) -> Talk:
    words = Words(lessons.split, draw)
    turn: Turn = chatting.unknown_turn(words, draw)
    return Talk((turn,))


SKILLS: Mapping[str, Skill] = {
    "colour": Skill(_one_picture("colour"), 200, 0.95),
    "shape": Skill(_one_picture("shape"), 200, 0.95),
    "count": Skill(_one_picture("count"), 200, 0.95),
    "left or right": Skill(_one_picture("left_right"), 200, 0.95),
    "earlier picture": Skill(_earlier_picture, 150, 0.95),
    "needle, 1k tokens": Skill(_needle(1900, 4), 100, 0.95),
    "needle, 4k tokens": Skill(_needle(8000, 8), 60, 0.95),
    "needle, 16k tokens": Skill(_needle(33_000, 8), 30, 0.85),
    "variables": Skill(_variable, 200, 0.95),
    "tool call": Skill(_called(with_result=False), 200, 0.95),
    "tool result": Skill(_called(with_result=True), 200, 0.95),
    "no call if told so": Skill(_refused, 100, None),
    "what is left of it": Skill(_one_picture("left_of"), 100, None),
    "count of a kind": Skill(_one_picture("count_some"), 100, None),
    "is it there": Skill(_one_picture("exists"), 100, None),
    "description": Skill(_one_picture("describe"), 100, None),
    "JSON": Skill(_json, 100, None),
    "says it does not know": Skill(_unknown, 100, None),
    "shape, effort low": Skill(_one_picture("shape"), 100, None, "low"),
    "shape, no thinking": Skill(_one_picture("shape"), 100, None, "off"),
    "left or right, effort low": Skill(_one_picture("left_right"), 100, None, "low"),
    "tool call, no thinking": Skill(_called(with_result=False), 100, None, "off"),
}
