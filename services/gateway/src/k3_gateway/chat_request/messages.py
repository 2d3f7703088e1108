"""Messages of a chat request: OpenAI's shapes in, the chat format's conversation out.

Nothing is dropped in silence: an unknown role or part is refused with its path. Every reasoning
field that clients send back is understood; images are allowed wherever the format renders them.
"""

from typing import cast

import msgspec

from k3_gateway.chat_request import fields
from k3_gateway.chat_request.tools import parse_tools
from k3text.chat_format.conversation import (
    AssistantMessage,
    Content,
    ImagePart,
    JsonObject,
    Message,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from k3wire.errors import TooManyImages, UnsupportedContentPart

TEXT_PARTS = ("text", "input_text", "refusal")
IMAGE_PARTS = ("image_url", "input_image")
MAX_MESSAGES = 16384


class ImageInput(msgspec.Struct, frozen=True, kw_only=True, tag="image-input"):
    """An image as the client named it.

    Attributes:
        url: http, https or data URL, unchecked.
        param: path of its part, for errors.
    """

    url: str
    param: str


class ParsedMessages(msgspec.Struct, frozen=True, kw_only=True, tag="parsed-messages"):
    """All messages; an `ImagePart.index` points into `images`."""

    messages: tuple[Message, ...]
    images: tuple[ImageInput, ...]


def parse_messages(body: fields.JsonObject, max_images: int) -> ParsedMessages:
    """Reads `messages`.

    Raises:
        InvalidRequest: a wrong shape, with its path.
        UnsupportedContentPart: a part that is neither text nor image.
        TooManyImages: more than `max_images`.
    """
    raw = body.get("messages")
    if raw is None:
        fields.refuse("messages", "is required")
    items = fields.as_list(raw, "messages")
    if not 0 < len(items) <= MAX_MESSAGES:
        fields.refuse("messages", f"must have 1 to {MAX_MESSAGES} messages, not {len(items)}")
    images: list[ImageInput] = []
    messages = tuple(
        _parse_message(fields.as_object(item, f"messages[{index}]"), index, images)
        for index, item in enumerate(items)
    )
    if len(images) > max_images:
        raise TooManyImages(
            f"A request may have at most {max_images} images, not {len(images)}", param="messages"
        )
    return ParsedMessages(messages=messages, images=tuple(images))


def _parse_message(item: fields.JsonObject, index: int, images: list[ImageInput]) -> Message:
    path = f"messages[{index}]."
    role = fields.read_string(item, "role", path=path)
    name = fields.read_string(item, "name", path=path)
    is_optional = role == "assistant" or item.get("tools") is not None
    content = _parse_content(item.get("content"), path, images, is_optional=is_optional)
    match role:
        case "system" | "developer":
            return _parse_system(item, content, name, path)
        case "user":
            return UserMessage(content=content, name=name)
        case "assistant":
            return _parse_assistant(item, content, name, path)
        case "tool":
            call_id = item.get("tool_call_id")
            if call_id is None:
                fields.refuse(path + "tool_call_id", "is required in a tool message")
            call_id = fields.as_string(call_id, path + "tool_call_id")
            return ToolMessage(content=content, tool_call_id=call_id, name=name)
        case _:
            fields.refuse(
                path + "role",
                f"must be system, developer, user, assistant or tool, not {role[:40]!r}",
            )


def _parse_system(item: fields.JsonObject, content: Content, name: str, path: str) -> Message:
    tools = parse_tools(item.get("tools"), path + "tools")
    if tools and content:
        fields.refuse(path + "content", "must be empty in a system message that declares tools")
    return SystemMessage(content=content, name=name, tools=tools)


def _parse_assistant(item: fields.JsonObject, content: Content, name: str, path: str) -> Message:
    calls: list[ToolCall] = []
    if item.get("tool_calls") is not None:
        for place, call in enumerate(fields.as_list(item["tool_calls"], path + "tool_calls")):
            calls.append(_parse_call(call, f"{path}tool_calls[{place}]"))
    if item.get("content") is None and not calls and not _reasoning(item, path):
        fields.refuse(path + "content", "may be null only beside tool_calls")
    return AssistantMessage(
        content=content,
        reasoning=_reasoning(item, path),
        tool_calls=tuple(calls),
        name=name,
        is_partial=fields.read_bool(item, "partial", False, path=path),
    )


def _reasoning(item: fields.JsonObject, path: str) -> str:
    for field in ("reasoning_content", "reasoning"):
        if item.get(field) is not None:
            return fields.as_string(item[field], path + field)
    if item.get("reasoning_details") is None:
        return ""
    details = fields.as_list(item["reasoning_details"], path + "reasoning_details")
    objects = [fields.as_object(one, path + "reasoning_details") for one in details]
    return "".join(fields.read_string(one, "text", path=path) for one in objects)


def _parse_call(value: object, path: str) -> ToolCall:
    call = fields.as_object(value, path)
    function = fields.as_object(call.get("function"), path + ".function")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        # Decoded JSON has no other shape than this.
        given: str | JsonObject = cast("JsonObject", arguments)
    else:
        given = "" if arguments is None else fields.as_string(arguments, path + ".arguments")
    name = fields.read_string(function, "name", path=path + ".function.")
    if not name:
        fields.refuse(path + ".function.name", "is required")
    return ToolCall(name=name, arguments=given, id=fields.read_string(call, "id", path=path + "."))


def _parse_content(
    value: object, path: str, images: list[ImageInput], *, is_optional: bool
) -> Content:
    if isinstance(value, str):
        return value
    if value is None:
        if not is_optional:
            fields.refuse(path + "content", "is required")
        return ""
    parts: list[TextPart | ImagePart] = []
    for place, item in enumerate(fields.as_list(value, path + "content")):
        parts.append(_parse_part(item, f"{path}content[{place}]", images))
    return tuple(parts)


def _parse_part(value: object, path: str, images: list[ImageInput]) -> TextPart | ImagePart:
    part = fields.as_object(value, path)
    kind = fields.read_string(part, "type", path=path + ".")
    if kind in TEXT_PARTS:
        field = "refusal" if kind == "refusal" else "text"
        if part.get(field) is None:
            fields.refuse(f"{path}.{field}", "is required")
        return TextPart(text=fields.read_string(part, field, path=path + "."))
    if kind in IMAGE_PARTS:
        inner = f"{path}.image_url"
        given = part.get("image_url")
        if isinstance(given, dict):
            url = fields.as_string(given.get("url"), inner + ".url")
        else:
            url = fields.as_string(given, inner)
        images.append(ImageInput(url=url, param=inner))
        return ImagePart(index=len(images) - 1)
    raise UnsupportedContentPart(
        f"Content parts of type {kind[:40]!r} are not served; use text or image_url",
        param=path + ".type",
    )
