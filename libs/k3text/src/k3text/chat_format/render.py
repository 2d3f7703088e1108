"""A conversation rendered to segments, in K3's order.

    tools . effort . messages . tool choice . response format . generation prompt

K3 has no template: this is the format. Enters: a typed conversation. Leaves: segments, of which
only the writer's own markers are special. What users, tools and models wrote never is.

Source: `encoding_k3.py` (`build_chat_segments`) of the release; bodies of system messages are
protocol literals and must match it byte for byte.
"""

import json
from collections.abc import Sequence

from k3text.chat_format.arguments import split_arguments
from k3text.chat_format.conversation import (
    AssistantMessage,
    Channel,
    Conversation,
    Effort,
    ImageSize,
    JsonObject,
    JsonValue,
    Message,
    RenderOptions,
    ResponseFormat,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from k3text.chat_format.segments import Segment, SegmentWriter
from k3text.chat_format.tool_results import order_tool_results
from k3wire.errors import InvalidRequest

TOOLS_BODY = (
    "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{json}\n```"
)
DYNAMIC_TOOLS_BODY = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n```json\n{json}\n```"
)
EFFORT_BODY = (
    "`thinking_effort` guides on how much to think in your thinking channel "
    "(not including the response channel), supported values include `low`, `medium`, `high`, "
    "and `max`.\nNow the system is invoked with `thinking_effort={effort}`."
)
TOOL_CHOICE_REQUIRED_BODY = (
    "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message."
)
TOOL_CHOICE_NONE_BODY = (
    "The system is invoked with `tool_choice=none`.\n"
    "You MUST NOT call any tools in the next message."
)
JSON_OBJECT_BODY = (
    "The system is invoked with `response_format=json_object`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) "
    "or any additional formatting."
)
JSON_SCHEMA_BODY = (
    "The system is invoked with `response_format=json_schema`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) "
    "or any additional formatting.\n"
    "The JSON data must match the following schema:\n```json\n{json}\n```"
)


def render(
    conversation: Conversation, options: RenderOptions, images: Sequence[ImageSize] = ()
) -> list[Segment]:
    """Renders a conversation.

    Args:
        conversation: what to render.
        options: how.
        images: sizes of the images that `ImagePart`s refer to; each must be referred to once.

    Raises:
        InvalidRequest: a tool result belongs to no call and has no name, image parts and images
            do not match, or a partial message is not the last or carries tool calls.
    """
    writer = SegmentWriter(images)
    if conversation.tools:
        _write_tools(writer, TOOLS_BODY, conversation.tools)
    if options.thinking and options.effort is not None:
        _write_effort(writer, options.effort)
    _write_messages(writer, order_tool_results(conversation.messages), options.thinking)
    if options.tool_choice == "required":
        _write_directive(writer, "tool-choice", TOOL_CHOICE_REQUIRED_BODY)
    elif options.tool_choice == "none":
        _write_directive(writer, "tool-choice", TOOL_CHOICE_NONE_BODY)
    if options.response_format is not None:
        _write_response_format(writer, options.response_format)
    partial = _partial_message(conversation.messages)
    if partial is not None:
        _write_partial(writer, partial, options.thinking)
    elif options.add_generation_prompt:
        writer.open_tag("message", [("role", "assistant")])
        writer.open_tag("think" if options.thinking else "response")
    writer.check_all_images_placed()
    return writer.segments


def start_channel(conversation: Conversation, options: RenderOptions) -> Channel:
    """Says in which channel the rendered prompt leaves the model; a parser starts there."""
    if _partial_message(conversation.messages) is not None or not options.thinking:
        return "response"
    return "think"


def _write_messages(writer: SegmentWriter, messages: Sequence[Message], thinking: bool) -> None:
    calls: Sequence[ToolCall] = ()
    num_results = 0
    for position, message in enumerate(messages):
        match message:
            case UserMessage(content=content, name=name):
                writer.open_tag("message", _role("user", name))
                writer.content(content)
                writer.close_message()
            case SystemMessage(tools=tools) if tools:
                _write_tools(writer, DYNAMIC_TOOLS_BODY, tools)
            case SystemMessage(content=content, name=name):
                writer.open_tag("message", _role("system", name))
                writer.content(content)
                writer.close_message()
            case ToolMessage():
                num_results += 1
                _write_tool_result(writer, message, calls, num_results)
            case AssistantMessage(is_partial=True):
                if position != len(messages) - 1 or message.tool_calls:
                    raise InvalidRequest(
                        "A partial assistant message must be the last and have no tool calls"
                    )
            case AssistantMessage():
                calls, num_results = message.tool_calls, 0
                _write_assistant(writer, message, thinking)


def _write_tool_result(
    writer: SegmentWriter, message: ToolMessage, calls: Sequence[ToolCall], index: int
) -> None:
    name = message.name
    if not name:
        if index > len(calls):
            raise InvalidRequest(
                "A tool message answers no tool call; set tool_call_id to the id of a call in "
                "the assistant message before it"
            )
        name = calls[index - 1].name
    writer.open_tag("message", [("role", "tool"), ("tool", name), ("index", str(index))])
    writer.content(message.content)
    writer.close_message()


def _write_assistant(writer: SegmentWriter, message: AssistantMessage, thinking: bool) -> None:
    writer.open_tag("message", _role("assistant", message.name))
    if thinking:
        writer.open_tag("think")
        writer.text(message.reasoning)
        writer.close_tag("think")
    writer.open_tag("response")
    writer.content(message.content)
    writer.close_tag("response")
    if message.tool_calls:
        writer.open_tag("tools")
        for index, call in enumerate(message.tool_calls, start=1):
            _write_call(writer, call, index)
        writer.close_tag("tools")
    writer.close_message()


def _write_call(writer: SegmentWriter, call: ToolCall, index: int) -> None:
    writer.open_tag("call", [("tool", call.name), ("index", str(index))])
    arguments = split_arguments(call.arguments)
    if arguments is None:
        writer.open_tag("json", [("type", "object")])
        writer.text(str(call.arguments))
        writer.close_tag("json")
    for argument in arguments or ():
        writer.open_tag("argument", [("key", argument.key), ("type", argument.type_name)])
        writer.text(argument.text)
        writer.close_tag("argument")
    writer.close_tag("call")


def _write_partial(writer: SegmentWriter, message: AssistantMessage, thinking: bool) -> None:
    # The turn is left open inside its response channel, so that the model goes on with it.
    writer.open_tag("message", _role("assistant", message.name))
    if thinking:
        writer.open_tag("think")
        writer.text(message.reasoning)
        writer.close_tag("think")
    writer.open_tag("response")
    writer.content(message.content)


def _write_tools(writer: SegmentWriter, body: str, tools: Sequence[JsonObject]) -> None:
    # Not stripped, unlike a directive: the release does not either.
    writer.open_tag("message", [("role", "system"), ("type", "tool-declare")])
    writer.text(body.replace("{json}", _canonical_json(list(tools))))
    writer.close_message()


def _write_effort(writer: SegmentWriter, effort: Effort) -> None:
    _write_directive(writer, "thinking-effort", EFFORT_BODY.replace("{effort}", effort))


def _write_response_format(writer: SegmentWriter, response_format: ResponseFormat) -> None:
    body = JSON_OBJECT_BODY
    if response_format.kind == "json_schema":
        body = JSON_SCHEMA_BODY.replace("{json}", _canonical_json(response_format.schema))
    _write_directive(writer, "response-format", body)


def _write_directive(writer: SegmentWriter, kind: str, body: str) -> None:
    writer.open_tag("message", [("role", "system"), ("type", kind)])
    writer.text(body)
    writer.close_message()


def _role(role: str, name: str) -> list[tuple[str, str]]:
    return [("role", role), ("name", name)] if name else [("role", role)]


def _partial_message(messages: Sequence[Message]) -> AssistantMessage | None:
    match messages[-1:]:
        case [AssistantMessage(is_partial=True) as message]:
            return message
        case _:
            return None


def _canonical_json(value: JsonValue | list[JsonObject]) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
