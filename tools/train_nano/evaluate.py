"""Accuracy of a checkpoint per skill, on held-out questions, through the real engine.

Each question is a prompt in the chat format, answered greedily by `LocalEngine`; earlier thoughts
are left out of it, as clients leave them out. An answer counts if it is the wanted one word for
word, a call if name and arguments are.
"""

import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from k3core.engine.local import LocalAnswer, LocalEngine, LocalImage, LocalRequest
from k3core.engine.parts import EngineSizes
from k3text.chat_format.conversation import AssistantMessage, Conversation, Message, TextPart
from k3text.chat_format.prompt import render_prompt_ids
from k3text.images.patchify import normalise
from k3text.images.processor import cut
from k3text.parsers.assemble import assemble
from k3text.parsers.events import ParsedMessage
from k3text.parsers.output_parser import OutputParser
from k3wire.messages.sampling import SamplingParams
from train_nano.lessons import Lessons
from train_nano.model import read_processing
from train_nano.probes import SKILLS, Skill
from train_nano.rows import conversation_of, options_of, sizes_of
from train_nano.talk import Talk

MAX_ANSWER_TOKENS = 160
PROBES_A_BATCH = 8
Z_95 = 1.96


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one skill.

    Attributes:
        num_probes: asked.
        num_right: answered as wanted.
        target: share wanted, or None.
        misses: a few (asked, wanted, said).
    """

    num_probes: int
    num_right: int
    target: float | None
    misses: tuple[tuple[str, str, str], ...]

    @property
    def accuracy(self) -> float:
        """Share answered as wanted."""
        return self.num_right / self.num_probes

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the accuracy (Wilson's)."""
        n, p, z = self.num_probes, self.accuracy, Z_95
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        # Rounding must not leave all or nothing outside of its own interval.
        low = 0.0 if self.num_right == 0 else middle - half
        high = 1.0 if self.num_right == n else middle + half
        return low, high


class Answering(Protocol):
    """Whoever answers the questions: an engine, or one that is asked in a way of its own."""

    def generate_all(self, requests: Sequence[LocalRequest]) -> list[LocalAnswer]:
        """Answers in the order of the requests."""
        ...


class Evaluation:
    """Asks one checkpoint."""

    def __init__(self, checkpoint: Path, seed: int, engine: Answering | None = None) -> None:
        """Reads the checkpoint's processing, and loads its model if no engine is given."""
        self._tokenizer, self._config = read_processing(checkpoint)
        self._engine = engine or LocalEngine(checkpoint, EngineSizes(arena_bytes=512 << 20))
        self._lessons = Lessons("held_out", self._config)
        self._seed = seed

    def measure(self, name: str, share: float) -> Result:
        """Accuracy in one skill.

        Args:
            name: of `train_nano.probes.SKILLS`.
            share: of the full number of questions.
        """
        skill = SKILLS[name]
        count = max(1, round(skill.num_probes * share))
        draw = random.Random(f"{name}/{self._seed}")
        num_right = 0
        misses: list[tuple[str, str, str]] = []
        talks = [skill.make(self._lessons, draw) for _ in range(count)]
        for first in range(0, count, PROBES_A_BATCH):
            batch = talks[first : first + PROBES_A_BATCH]
            for talk, said in zip(batch, self._answers(batch, skill), strict=True):
                wanted = _wanted(talk)
                if (said.content, _calls(said)) == wanted:
                    num_right += 1
                elif len(misses) < 3:
                    misses.append((_asked(talk), str(wanted), _shown(said)))
        return Result(count, num_right, skill.target, tuple(misses))

    def _answers(self, talks: Iterable[Talk], skill: Skill) -> list[ParsedMessage]:
        requests: list[LocalRequest] = []
        channels: list[str] = []
        for talk in talks:
            images = tuple(cut(picture.data, self._config) for picture in talk.pictures)
            messages = _question_of(talk, skill)
            prompt = render_prompt_ids(
                Conversation(messages=messages, tools=talk.tools),
                options_of(talk, skill.mode),
                sizes_of(images),
                self._tokenizer,
            )
            pictures = [
                LocalImage(torch.from_numpy(normalise(i.pixels, self._config)), i.grid_thw)
                for i in images
            ]
            ids = memoryview(prompt.token_ids).cast("i").tolist()
            requests.append(LocalRequest(ids, self._sampling(), pictures))
            channels.append(prompt.start_channel)
        answers = self._engine.generate_all(requests)
        return [
            _parsed(OutputParser(self._tokenizer, "think" if c == "think" else "response"), a)
            for c, a in zip(channels, (a.token_ids for a in answers), strict=True)
        ]

    def _sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=0.0,
            max_tokens=MAX_ANSWER_TOKENS,
            stop_token_ids=(self._tokenizer.specials.end_of_msg,),
        )


def _question_of(talk: Talk, skill: Skill) -> tuple[Message, ...]:
    """All messages but the last answer, earlier thoughts left out."""
    messages, _ = conversation_of(talk, skill.mode)
    while messages and not _is_answer(messages[-1]):
        messages.pop()
    return tuple(_without_thought(message) for message in messages[:-1])


def _is_answer(message: Message) -> bool:
    match message:
        case AssistantMessage():
            return True
        case _:
            return False


def _without_thought(message: Message) -> Message:
    match message:
        case AssistantMessage(content=content, tool_calls=calls):
            return AssistantMessage(content=content, tool_calls=calls)
        case _:
            return message


def _parsed(parser: OutputParser, token_ids: tuple[int, ...]) -> ParsedMessage:
    events = parser.feed(token_ids)
    events += parser.finish(is_cut=not parser.is_done)
    return assemble(events)


def _wanted(talk: Talk) -> tuple[str, tuple[tuple[str, str], ...]]:
    reply = talk.turns[-1].replies[-1]
    calls = tuple((call.name, _canonical(str(call.arguments))) for call in reply.calls)
    return reply.answer, calls


def _calls(said: ParsedMessage) -> tuple[tuple[str, str], ...]:
    return tuple((call.name, _canonical(call.arguments)) for call in said.tool_calls)


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except ValueError:
        return arguments


def _asked(talk: Talk) -> str:
    content = talk.turns[-1].content
    if isinstance(content, str):
        return content[-120:]
    return "".join(part.text if isinstance(part, TextPart) else "*" for part in content)


def _shown(said: ParsedMessage) -> str:
    return f"[{said.reasoning}] {said.content} {_calls(said) or ''}"
