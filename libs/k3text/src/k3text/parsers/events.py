"""What a parser finds in the model's output, in the order in which a client may see it.

Reasoning comes first, then content, then tool calls; never back. The pieces of one kind, joined,
do not depend on how the tokens were split into deltas.
"""

import msgspec


class ReasoningDelta(msgspec.Struct, frozen=True, kw_only=True, tag="reasoning"):
    """More reasoning.

    Attributes:
        text: may be "" while a character is incomplete.
        positions: of the tokens this text is made of, counted from the first output token.
    """

    text: str
    positions: tuple[int, ...] = ()


class ContentDelta(msgspec.Struct, frozen=True, kw_only=True, tag="content"):
    """More of the visible answer.

    Attributes:
        text: may be "" while a character is incomplete.
        positions: of the tokens this text is made of, counted from the first output token.
    """

    text: str
    positions: tuple[int, ...] = ()


class ToolCallStart(msgspec.Struct, frozen=True, kw_only=True, tag="call-start"):
    """A call begins; its name is whole.

    Attributes:
        index: from 0, in order of appearance; the model's own number is ignored.
        name: unescaped.
    """

    index: int
    name: str


class ToolCallArgumentsDelta(msgspec.Struct, frozen=True, kw_only=True, tag="call-arguments"):
    """More of a call's arguments: JSON text, never empty."""

    index: int
    text: str


class ToolCallEnd(msgspec.Struct, frozen=True, kw_only=True, tag="call-end"):
    """A call ends.

    Attributes:
        index: which.
        is_complete: False if the output was cut inside it; its arguments are then cut, too.
    """

    index: int
    is_complete: bool = True


Event = ReasoningDelta | ContentDelta | ToolCallStart | ToolCallArgumentsDelta | ToolCallEnd


class ParsedCall(msgspec.Struct, frozen=True, kw_only=True, tag="parsed-call"):
    """One call, assembled.

    Attributes:
        name: of the tool.
        arguments: JSON text of an object; the model's own text if it wrote a raw block.
        is_complete: False if the output was cut inside it.
    """

    name: str
    arguments: str
    is_complete: bool = True


class ParsedMessage(msgspec.Struct, frozen=True, kw_only=True, tag="parsed-message"):
    """One answer, assembled from its events."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ParsedCall, ...] = ()
