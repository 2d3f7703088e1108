"""What lessons say is true of what they show, and what is held out stays out of training."""

import json
import random
import re
from itertools import pairwise

import pytest

from k3text.images.config import ProcessorConfig
from k3text.images.geometry import plan
from train_nano import acting, reading, recalling, seeing
from train_nano.lessons import Lessons
from train_nano.scenes import MIN_GAP_X, Scene, Thing, random_scene
from train_nano.words import PEOPLE, PLACES, Words

CONFIG = ProcessorConfig(max_patches=64)
UNIT = CONFIG.patch_size * CONFIG.merge_size
SHOWN = Scene(
    224,
    112,
    2.0,
    (
        Thing("blue", "star", 90.0, 10.0, 10.0),
        Thing("red", "circle", 20.0, 40.0, 10.0),
        Thing("red", "square", 60.0, 45.0, 10.0),
    ),
)


def test_objects_stand_in_the_order_of_their_vision_tokens_one_to_a_token() -> None:
    draw = random.Random(1)
    for _ in range(60):
        scene = random_scene(draw, CONFIG)
        columns = plan(scene.width, scene.height, CONFIG).padded_width // UNIT
        tokens = [int(t.y // UNIT) * columns + int(t.x // UNIT) for t in scene.things]
        assert tokens == sorted(set(tokens))
        xs = sorted(thing.x for thing in scene.things)
        assert all(b - a >= MIN_GAP_X for a, b in pairwise(xs))
        places = [scene.column(thing) for thing in sorted(scene.things, key=lambda t: t.x)]
        assert places == sorted(set(places))


@pytest.mark.parametrize(
    ("skill", "start"),
    [
        ("shape", "1 blue star 8, 2 red circle 1, 3 red square 5"),
        ("colour", "1 star blue 8, 2 circle red 1, 3 square red 5"),
        ("count", "1 blue star 8, 2 red circle 1, 3 red square 5"),
        ("left_right", "1 blue star 8, 2 red circle 1, 3 red square 5. "),
    ],
)
def test_the_thought_lists_what_is_there_known_word_first(skill: str, start: str) -> None:
    question = seeing.ask(skill, SHOWN, random.Random(2))
    assert question is not None
    assert question.thought.startswith(start)


def test_answers_follow_from_the_scene() -> None:
    draw = random.Random(3)
    for _ in range(40):
        scene = random_scene(draw, CONFIG)
        count = seeing.ask("count", scene, draw)
        assert count is not None
        assert count.answer == str(len(scene.things))
        sides = seeing.ask("left_right", scene, draw)
        if len(scene.things) == 1:
            assert sides is None
            continue
        assert sides is not None
        by_words = {f"{t.colour} {t.shape}": t for t in scene.things}
        text = sides.text
        first, second = sorted((w for w in by_words if w in text), key=text.index)
        is_left = by_words[first].x < by_words[second].x
        assert sides.answer == ("left" if is_left else "right")


def test_a_variable_has_the_value_that_was_set_last() -> None:
    draw = random.Random(4)
    for _ in range(20):
        turns = reading.variable_turns(Words("train", draw), draw, 8)
        said = " ".join(str(turn.content) for turn in turns)
        for turn in turns:
            if turn.skill == "variable":
                assert turn.replies[0].answer in said
                assert turn.replies[0].thought.endswith(f" = {turn.replies[0].answer}")


def test_after_a_message_that_sets_variables_all_that_holds_is_said_back() -> None:
    draw = random.Random(8)
    for _ in range(20):
        values: dict[str, str] = {}
        for turn in reading.variable_turns(Words("train", draw), draw, 8):
            if turn.skill != "noted":
                continue
            said = turn.replies[0].answer.removeprefix("OK: ").removesuffix(".").split(", ")
            was_set = re.findall(r"(\w+ = \w+)", str(turn.content))
            values |= dict(pair.split(" = ") for pair in was_set)
            assert dict(pair.split(" = ") for pair in said) == values


def test_a_call_copies_what_the_request_says() -> None:
    draw = random.Random(5)
    words = Words("held_out", draw)
    for _ in range(40):
        tools = acting.random_tools(words, draw)
        turn = acting.call_turn(tools, words, draw, with_result=False)
        (call,) = turn.replies[0].calls
        (tool,) = [tool for tool in tools if tool.name == call.name]
        values = json.loads(str(call.arguments))
        assert list(values) == [key for key, _ in tool.keys]
        assert all(f"{key} {value}" in str(turn.content) for key, value in values.items())
        said = turn.replies[0].thought.removeprefix(f"call {tool.name} with ")
        assert said in str(turn.content)


def test_a_fact_that_was_not_told_is_asked_of_known_names_too() -> None:
    draw = random.Random(9)
    words = Words("train", draw)
    names: set[str] = set()
    for _ in range(200):
        turns = reading.fact_turns(words, draw, 3, 0, 3)
        told = str(turns[0].content)
        for turn in turns:
            if turn.skill == "unknown_fact":
                name = turn.replies[0].thought.removesuffix(" is not told").split(" of ")[1]
                assert f"of {name} is" not in told
                names.add(name)
    known = names & {*PEOPLE, *PLACES}
    assert known
    assert names - known


def test_sentences_and_invented_words_of_the_two_splits_have_nothing_in_common() -> None:
    draw = random.Random(6)
    train, held_out = Words("train", draw), Words("held_out", draw)
    assert not {train.sentence() for _ in range(500)} & {held_out.sentence() for _ in range(500)}
    assert not {train.invented() for _ in range(500)} & {held_out.invented() for _ in range(500)}


def test_lessons_of_one_seed_are_the_same() -> None:
    def lesson(seed: int) -> object:
        return Lessons("train", CONFIG).text(random.Random(seed))

    assert lesson(1) == lesson(1)
    assert lesson(1) != lesson(2)


def test_what_is_recalled_is_what_was_told_last_under_that_name() -> None:
    draw = random.Random(5)
    for _ in range(120):
        turn = recalling.recall_turn(Words("train", draw), draw)
        told, _, asked = str(turn.content).rpartition(". ")
        (reply,) = turn.replies
        pairs = reply.thought.removeprefix("so ").split(", ")
        for said, value in zip(pairs, reply.answer.split(", "), strict=True):
            name = said.removesuffix(f" {value}")
            assert name.removesuffix(" is").removesuffix(" =") in asked
            later = [m.start() for m in re.finditer(rf"\b{re.escape(name)} ", told)]
            assert told.startswith(said, later[-1]), "no later value under that name"
