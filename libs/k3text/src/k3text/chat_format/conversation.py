"""A conversation as the chat format sees it: typed, checked by whoever built it, ready to render.

Roles and parts that are not here do not exist for K3: a gateway maps `developer` to system and
refuses the rest before it comes to this.
"""

from typing import Literal

import msgspec

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]
JsonObject = dict[str, JsonValue]
"""JSON as a client sent it: tool definitions, schemas, arguments. Rendered, never interpreted."""

Effort = Literal["low", "high", "max"]
ToolChoice = Literal["auto", "none", "required"]
"""What the prompt can say of tools; a named choice is `auto` here and a matter of the grammar."""
Channel = Literal["think", "response"]
"""The two channels in which an answer may begin."""


class TextPart(msgspec.Struct, frozen=True, kw_only=True, tag="text"):
    """A piece of text; pieces are joined without anything between them."""

    text: str


class ImagePart(msgspec.Struct, frozen=True, kw_only=True, tag="image"):
    """A place for an image.

    Attributes:
        index: which of the images given to `render`, from 0.
    """

    index: int


Content = str | tuple[TextPart | ImagePart, ...]


class ImageSize(msgspec.Struct, frozen=True, kw_only=True, tag="size"):
    """What the prompt tells of an image.

    Attributes:
        width: pixels before any resizing, after EXIF orientation.
        height: likewise.
        num_tokens: pad tokens it takes, one for each merged patch.
    """

    width: int
    height: int
    num_tokens: int


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, tag="call"):
    """A call an assistant made.

    Attributes:
        name: of the tool.
        arguments: a string as the model or the client wrote it, kept literally value by value
            (and whole, if it is no JSON object); or a parsed object, written anew.
        id: what tool results refer to; "" if none.
    """

    name: str
    arguments: str | JsonObject = ""
    id: str = ""


class SystemMessage(msgspec.Struct, frozen=True, kw_only=True, tag="system"):
    """Instructions; or, with `tools`, an extension of the toolset in mid-conversation.

    Attributes:
        content: not rendered if there are tools.
        name: of the speaker, "" if none.
        tools: definitions that become available from here on.
    """

    content: Content = ""
    name: str = ""
    tools: tuple[JsonObject, ...] = ()


class UserMessage(msgspec.Struct, frozen=True, kw_only=True, tag="user"):
    """What a user said."""

    content: Content = ""
    name: str = ""


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True, tag="assistant"):
    """What the model said before.

    Attributes:
        content: visible answer.
        reasoning: rendered in thinking mode only.
        tool_calls: in the order they were made.
        name: of the speaker, "" if none.
        is_partial: the last message only: the answer goes on where `content` ends.
    """

    content: Content = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    name: str = ""
    is_partial: bool = False


class ToolMessage(msgspec.Struct, frozen=True, kw_only=True, tag="tool"):
    """What a tool answered.

    Attributes:
        content: text and images.
        tool_call_id: id of the call it answers, "" if the client gave none.
        name: of the tool, if the client gave one; a matching call's name wins.
    """

    content: Content = ""
    tool_call_id: str = ""
    name: str = ""


Message = SystemMessage | UserMessage | AssistantMessage | ToolMessage


class Conversation(msgspec.Struct, frozen=True, kw_only=True, tag="conversation"):
    """Everything a prompt is made of, but images and options.

    Attributes:
        messages: in order.
        tools: definitions available from the start, as the client sent them.
    """

    messages: tuple[Message, ...]
    tools: tuple[JsonObject, ...] = ()


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, tag="format"):
    """The shape an answer must have.

    Attributes:
        kind: any JSON object, or JSON by a schema.
        schema: of `json_schema`.
    """

    kind: Literal["json_object", "json_schema"]
    schema: JsonValue = None


class RenderOptions(msgspec.Struct, frozen=True, kw_only=True, tag="options"):
    """How to render.

    Attributes:
        thinking: whether the model reasons before it answers; also whether earlier reasoning is
            shown to it.
        effort: how much; None leaves the directive out. No meaning without thinking.
        tool_choice: said to the model unless `auto`.
        response_format: said to the model if there is one.
        add_generation_prompt: whether the prompt ends where an answer begins.
    """

    thinking: bool = True
    effort: Effort | None = "max"
    tool_choice: ToolChoice = "auto"
    response_format: ResponseFormat | None = None
    add_generation_prompt: bool = True
