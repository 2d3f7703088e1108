"""Which lessons are given, how often, and how long they are."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from k3text.images.config import ProcessorConfig
from train_nano import acting, chatting, reading, recalling, seeing
from train_nano.talk import Mode, Split, Talk, Turn
from train_nano.words import Words

SYSTEMS = ("", "", "", "You are a helpful assistant.", "Be brief.", "Answer the question.")
MODES: tuple[Mode, ...] = ("max", "max", "max", "max", "high", "low", "off")

Lesson: TypeAlias = Callable[[Words, random.Random], Talk]


@dataclass(frozen=True, slots=True)
class Lessons:
    """Draws lessons from one split.

    Attributes:
        split: whose words and sentences are used.
        config: of the pictures.
    """

    split: Split
    config: ProcessorConfig

    def picture(self, draw: random.Random, num_questions: int = 3) -> Talk:
        """A conversation about pictures, with now and then a turn about something else."""
        words = Words(self.split, draw)
        turns, pictures = seeing.picture_turns(draw, self.config, num_questions)
        if draw.random() < 0.25:
            turns.insert(draw.randint(1, len(turns)), self._aside(words, draw))
        return Talk(tuple(turns), tuple(pictures), draw.choice(SYSTEMS))

    def text(self, draw: random.Random) -> Talk:
        """A short lesson without pictures: tools, facts, variables, JSON, talk."""
        kind = draw.random()
        words = Words(self.split, draw)
        if kind < 0.03:
            return Talk(tuple(chatting.repeat_turn(words, draw) for _ in range(3)))
        if kind < 0.53:
            return self.tools(draw)
        if kind < 0.65:
            return self.needle(draw, draw.choice((0, 200, 500)), draw.randint(1, 5), 4)
        if kind < 0.85:
            turns = reading.variable_turns(words, draw, draw.randint(4, 9))
        elif kind < 0.88:
            turns = seeing.told_turns(draw, self.config, 4)
        elif kind < 0.97:
            turn, wanted = chatting.json_turn(words, draw)
            return Talk((*self._asides(words, draw), turn), response_format=wanted)
        else:
            turns = list(self._asides(words, draw, 3))
        return Talk(tuple(turns), system=draw.choice(SYSTEMS))

    def copying(self, draw: random.Random) -> Talk:
        """Little but copying: what every other skill rests on, and what appears all at once."""
        words = Words(self.split, draw)
        if draw.random() < 0.5:
            return Talk(tuple(chatting.repeat_turn(words, draw, 20) for _ in range(3)))
        num_facts = draw.randint(3, 7)
        return Talk(tuple(reading.fact_turns(words, draw, num_facts, 0, num_facts)))

    def recall(self, draw: random.Random) -> Talk:
        """Look-up by name and little else, one or two turns of it."""
        words = Words(self.split, draw)
        turns = [recalling.recall_turn(words, draw) for _ in range(draw.choice((1, 1, 2)))]
        return Talk(tuple(turns), system=draw.choice(SYSTEMS))

    def tools(self, draw: random.Random) -> Talk:
        """Declared tools and requests for them."""
        words = Words(self.split, draw)
        tools = acting.random_tools(words, draw)
        declared = tuple(tool.declaration() for tool in tools)
        turns = [
            acting.call_turn(tools, words, draw, with_result=True)
            for _ in range(draw.randint(0, 3))
        ]
        last = draw.random()
        if last < 0.12:
            turns.append(acting.refused_turn(tools, words, draw))
            return Talk(tuple(turns), tools=declared, tool_choice="none")
        if last < 0.2:
            turns.append(acting.missing_turn(tools, words, draw))
        elif last < 0.3:
            turns.append(self._aside(words, draw))
        else:
            turns.append(acting.call_turn(tools, words, draw, with_result=draw.random() < 0.6))
        required = draw.random() < 0.1 and turns[-1].skill == "tool_call"
        required = required and len(turns[-1].replies) == 1
        choice = "required" if required else "auto"
        return Talk(tuple(turns), (), draw.choice(SYSTEMS), declared, choice)

    def needle(
        self, draw: random.Random, filler_characters: int, num_facts: int, num_questions: int
    ) -> Talk:
        """Facts in filler, and questions about them."""
        words = Words(self.split, draw)
        turns = reading.fact_turns(words, draw, num_facts, filler_characters, num_questions)
        return Talk(tuple(turns), system=draw.choice(SYSTEMS))

    def _asides(self, words: Words, draw: random.Random, most: int = 1) -> tuple[Turn, ...]:
        low = 1 if most > 1 else 0
        return tuple(self._aside(words, draw) for _ in range(draw.randint(low, most)))

    def _aside(self, words: Words, draw: random.Random) -> Turn:
        kind = draw.random()
        if kind < 0.35:
            return chatting.greeting_turn(draw)
        return chatting.unknown_turn(words, draw)
