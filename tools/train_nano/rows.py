"""A talk turned into tokens: what the model reads, which of it it must learn to say, its pictures.

The chat format and the preprocessing are those of the services. Only what an assistant says is
learned, up to and including the end of its message; everything else is context.
"""

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from k3text.chat_format.conversation import (
    AssistantMessage,
    Conversation,
    ImageSize,
    Message,
    RenderOptions,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from k3text.chat_format.render import render
from k3text.chat_format.segments import Segment
from k3text.images.config import ProcessorConfig
from k3text.images.processor import PatchedImage, cut
from k3text.special_tokens import END_OF_MSG, OPEN, SEP
from k3text.tokenizer import Tokenizer
from train_nano.talk import Mode, Reply, Talk

SILENT_ROW_SHARE = 0.35
"""Rows in which earlier thoughts are gone, as clients that do not send reasoning back make them."""


@dataclass(frozen=True, slots=True)
class Row:
    """One training sequence.

    Attributes:
        ids: [T], int32.
        is_learned: [T], whether the token is an assistant's own.
        images: patches of each picture.
        offsets: of each picture's first pad.
        objects: of each picture, (class, x, y) as `Picture` has them.
    """

    ids: npt.NDArray[np.int32]
    is_learned: npt.NDArray[np.bool_]
    images: tuple[PatchedImage, ...]
    offsets: tuple[int, ...]
    objects: tuple[tuple[tuple[int, float, float], ...], ...]


class RowWriter:
    """Writes rows for one vocabulary and one set of image rules."""

    def __init__(self, tokenizer: Tokenizer, config: ProcessorConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._known: dict[tuple[str, bool], list[int]] = {}

    def write(self, talk: Talk, mode: Mode, draw: random.Random) -> Row:
        """Tokens of a whole talk, its last answer included."""
        is_silent = len(talk.turns) > 1 and mode != "off" and draw.random() < SILENT_ROW_SHARE
        messages, is_learned = conversation_of(talk, mode, is_silent)
        images = tuple(cut(picture.data, self._config) for picture in talk.pictures)
        segments, answer = _segments(talk, mode, messages, images)
        ids: list[int] = []
        learned: list[bool] = []
        offsets: list[int] = []
        for segment, own in _marked(segments, is_learned):
            if segment.image_index is not None:
                offsets.append(len(ids))
            pieces = self._encode(segment) * segment.num_repeats
            ids.extend(pieces)
            learned.extend([own] * len(pieces))
        for segment in answer:
            pieces = self._encode(segment)
            ids.extend(pieces)
            learned.extend([True] * len(pieces))
        objects = tuple(picture.objects for picture in talk.pictures)
        return Row(np.array(ids, np.int32), np.array(learned), images, tuple(offsets), objects)

    def _encode(self, segment: Segment) -> list[int]:
        key = (segment.text, segment.is_special)
        ids = self._known.get(key)
        if ids is None:
            ids = self._tokenizer.encode_segment(*key)
            if len(segment.text) < 40:
                self._known[key] = ids
        return ids


def conversation_of(
    talk: Talk, mode: Mode, is_silent: bool = False
) -> tuple[list[Message], list[bool]]:
    """A talk's messages, and for each assistant message whether it is learned.

    Args:
        talk: the lesson.
        mode: how much is thought.
        is_silent: thoughts of all but the last assistant message are left out, and such
            messages are not learned.
    """
    messages: list[Message] = [SystemMessage(content=talk.system)] if talk.system else []
    assistants: list[int] = []
    num_calls = 0
    for turn in talk.turns:
        messages.append(UserMessage(content=turn.content))
        for reply in turn.replies:
            calls = tuple(
                ToolCall(name=call.name, arguments=call.arguments, id=f"call_{num_calls + index}")
                for index, call in enumerate(reply.calls)
            )
            num_calls += len(calls)
            assistants.append(len(messages))
            messages.append(
                AssistantMessage(
                    content=reply.answer, reasoning=_thought(reply, mode), tool_calls=calls
                )
            )
            for call, result in zip(calls, reply.results, strict=False):
                messages.append(ToolMessage(content=result, tool_call_id=call.id))
    is_learned = [True] * len(assistants)
    if is_silent:
        for order, place in enumerate(assistants[:-1]):
            said = messages[place]
            assert isinstance(said, AssistantMessage), "the place of an assistant message"
            if said.reasoning:
                is_learned[order] = False
                messages[place] = AssistantMessage(content=said.content, tool_calls=said.tool_calls)
    return messages, is_learned


def options_of(talk: Talk, mode: Mode) -> RenderOptions:
    """How a prompt for the talk's last answer is rendered."""
    return RenderOptions(
        thinking=mode != "off",
        effort=None if mode == "off" else mode,
        tool_choice=talk.tool_choice,
        response_format=talk.response_format,
    )


def sizes_of(images: tuple[PatchedImage, ...]) -> list[ImageSize]:
    """What the prompt tells of pictures."""
    return [
        ImageSize(width=image.width, height=image.height, num_tokens=image.num_tokens)
        for image in images
    ]


def written_text(talk: Talk, mode: Mode, config: ProcessorConfig) -> str:
    """The ordinary text of a talk, piece by piece, without markers."""
    messages, _ = conversation_of(talk, mode)
    images = tuple(cut(picture.data, config) for picture in talk.pictures)
    prompt, answer = _segments(talk, mode, messages, images)
    return "\n".join(s.text for s in (*prompt, *answer) if not s.is_special)


def _thought(reply: Reply, mode: Mode) -> str:
    if mode == "off":
        return ""
    return reply.short_thought if mode == "low" else reply.thought


def _segments(
    talk: Talk, mode: Mode, messages: list[Message], images: tuple[PatchedImage, ...]
) -> tuple[list[Segment], list[Segment]]:
    """The prompt of the last answer, and the answer.

    Directives stand between the last question and the answer, so the answer is cut from a
    rendering of its own and put behind the prompt.
    """
    sizes = sizes_of(images)
    asked = Conversation(messages=tuple(messages[:-1]), tools=talk.tools)
    answered = Conversation(messages=tuple(messages), tools=talk.tools)
    options = options_of(talk, mode)
    plain = RenderOptions(
        thinking=options.thinking, effort=options.effort, add_generation_prompt=False
    )
    prompt = render(asked, options, sizes)
    before = len(render(asked, plain, sizes))
    header = len(render(asked, RenderOptions(thinking=plain.thinking, effort=plain.effort), sizes))
    answer = render(answered, plain, sizes)[header:]
    assert prompt[before - 1] == render(answered, plain, sizes)[before - 1], "one rendering"
    return prompt, answer


def _marked(segments: list[Segment], is_learned: list[bool]) -> list[tuple[Segment, bool]]:
    """Each segment with whether it belongs to what an earlier assistant message says."""
    marked: list[tuple[Segment, bool]] = []
    number = -1
    is_own = False
    seps_left = -1
    for index, segment in enumerate(segments):
        marked.append((segment, is_own))
        if segment.is_special and segment.text == END_OF_MSG:
            is_own, seps_left = False, -1
        elif segment.is_special and segment.text == SEP and seps_left > 0:
            seps_left -= 1
            is_own = seps_left == 0 and is_learned[number]
        elif segment.is_special and segment.text == OPEN and _opens_assistant(segments, index):
            number += 1
            seps_left = 2
    return marked


def _opens_assistant(segments: list[Segment], index: int) -> bool:
    ahead = [s.text for s in segments[index + 1 : index + 5]]
    return ahead == ["message", " role", '="', "assistant"]
