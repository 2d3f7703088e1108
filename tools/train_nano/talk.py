"""What a lesson is made of: turns of question, thought and answer, before they become tokens.

A skill writes `Turn`s; it says what the full thought and the short one are, and knows nothing of
the chat format. `train_nano.rows` turns a `Talk` into a conversation and that into tokens.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from k3text.chat_format.conversation import Content, JsonObject, ResponseFormat, ToolCall

Split: TypeAlias = Literal["train", "held_out"]
"""Names, words, sentences and scenes are dealt to one of the two and never appear in the other."""

Mode: TypeAlias = Literal["max", "high", "low", "off"]
"""How much is thought: an effort of the chat format, or no think channel at all."""

ToolChoice: TypeAlias = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True)
class Reply:
    """One assistant message.

    Attributes:
        answer: visible text; may be empty if there are calls.
        thought: in the think channel at efforts `high` and `max`.
        short_thought: likewise at `low`.
        calls: tools called.
        results: what they gave, in order; a reply with results is followed by another reply.
    """

    answer: str
    thought: str = ""
    short_thought: str = ""
    calls: tuple[ToolCall, ...] = ()
    results: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """A user message and what follows it.

    Attributes:
        skill: name under which accuracy is counted.
        content: of the user message; image parts count the talk's pictures.
        replies: at least one.
    """

    skill: str
    content: Content
    replies: tuple[Reply, ...]


@dataclass(frozen=True, slots=True)
class Talk:
    """A whole lesson.

    Attributes:
        turns: in order.
        pictures: encoded image files, in the order they are shown.
        labels: of each picture, a class for each object, see `train_nano.scenes.Scene`.
        system: system message, "" for none.
        tools: declared ones.
        tool_choice: said before the last answer.
        response_format: likewise.
    """

    turns: tuple[Turn, ...]
    pictures: tuple["Picture", ...] = ()
    system: str = ""
    tools: tuple[JsonObject, ...] = ()
    tool_choice: ToolChoice = "auto"
    response_format: ResponseFormat | None = None


@dataclass(frozen=True, slots=True)
class Picture:
    """An encoded image and what is in it.

    Attributes:
        data: file bytes.
        objects: (class index, x, y) of each object, centres as fractions of width and height.
    """

    data: bytes
    objects: tuple[tuple[int, float, float], ...] = field(default=())
