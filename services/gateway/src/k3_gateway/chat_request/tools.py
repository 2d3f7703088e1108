"""Tools, tool choice, response format and reasoning controls of a chat request."""

import re
from typing import Literal, cast

from k3_gateway.chat_request import fields
from k3text.chat_format.conversation import (
    Effort,
    JsonObject,
    RenderOptions,
    ResponseFormat,
    ToolChoice,
)
from k3wire.errors import UnsupportedParameter

MAX_TOOL_NAME_CHARS = 256
_TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*\Z")

EFFORTS: dict[str, Effort] = {
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}
"""What clients say, and the nearest that K3 knows."""


def parse_tools(value: object, path: str) -> tuple[JsonObject, ...]:
    """Reads a list of tool definitions; null and an empty list are no tools.

    Raises:
        InvalidRequest: not a list, not functions, bad or repeated names.
    """
    if value is None:
        return ()
    tools: list[JsonObject] = []
    names: set[str] = set()
    for place, item in enumerate(fields.as_list(value, path)):
        here = f"{path}[{place}]"
        tool = fields.as_object(item, here)
        if tool.get("type") != "function":
            fields.refuse(here + ".type", 'must be "function"')
        function = fields.as_object(tool.get("function"), here + ".function")
        name = fields.as_string(function.get("name"), here + ".function.name")
        if len(name) > MAX_TOOL_NAME_CHARS or not _TOOL_NAME.match(name):
            fields.refuse(
                here + ".function.name",
                "must begin with a letter or _ and hold letters, digits, _, - and . only",
            )
        if name in names:
            fields.refuse(here + ".function.name", f"{name!r} is declared twice")
        names.add(name)
        if function.get("parameters") is not None:
            fields.as_object(function["parameters"], here + ".function.parameters")
        # Decoded JSON has no other shape than this.
        tools.append(cast("JsonObject", tool))
    return tuple(tools)


def parse_render_options(body: fields.JsonObject, has_tools: bool) -> RenderOptions:
    """Reads how the prompt is to be rendered.

    Args:
        body: the request.
        has_tools: whether any tool is declared, globally or in a system message.

    Raises:
        InvalidRequest: a control of the wrong type or value.
    """
    is_thinking, effort = _parse_reasoning(body)
    return RenderOptions(
        thinking=is_thinking,
        effort=effort,
        tool_choice=_parse_tool_choice(body, has_tools),
        response_format=_parse_response_format(body.get("response_format")),
    )


def _parse_tool_choice(body: fields.JsonObject, has_tools: bool) -> ToolChoice:
    value = body.get("tool_choice")
    if value is None:
        return "auto"
    if not isinstance(value, str):
        raise UnsupportedParameter(
            "'tool_choice' with a function's name is not served yet; use auto, none or required",
            param="tool_choice",
        )
    choice = fields.read_choice(body, "tool_choice", "auto", ("auto", "none", "required"))
    if choice == "required" and not has_tools:
        fields.refuse("tool_choice", "is 'required', but no tools are declared")
    return cast("ToolChoice", choice)


def _parse_reasoning(body: fields.JsonObject) -> tuple[bool, Effort]:
    """Precedence: chat_template_kwargs, then thinking.effort, reasoning_effort, `max`."""
    kwargs = fields.as_object(body.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    unknown = sorted(set(kwargs) - {"thinking", "enable_thinking", "thinking_effort"})
    if unknown:
        raise UnsupportedParameter(
            f"'chat_template_kwargs.{unknown[0][:40]}' is not supported here; remove it",
            param="chat_template_kwargs",
        )
    for name in ("thinking", "enable_thinking"):
        if kwargs.get(name) is not None:
            is_on = fields.read_bool(kwargs, name, True, path="chat_template_kwargs.")
            return is_on, _effort(kwargs, "thinking_effort", "chat_template_kwargs.") or "max"
    in_kwargs = _effort(kwargs, "thinking_effort", "chat_template_kwargs.")
    if in_kwargs is not None:
        return True, in_kwargs
    if body.get("thinking") is not None:
        thinking = fields.as_object(body["thinking"], "thinking")
        kind = fields.read_choice(
            thinking, "type", "enabled", ("enabled", "disabled"), path="thinking."
        )
        effort = _effort(thinking, "effort", "thinking.") or _effort_or_none(body)
        return kind == "enabled", effort or "max"
    if body.get("reasoning_effort") == "none":
        return False, "max"
    return True, _effort(body, "reasoning_effort", "") or "max"


def _effort_or_none(body: fields.JsonObject) -> Effort | None:
    if body.get("reasoning_effort") == "none":
        return None
    return _effort(body, "reasoning_effort", "")


def _effort(source: fields.JsonObject, name: str, path: str) -> Effort | None:
    if source.get(name) is None:
        return None
    return EFFORTS[fields.read_choice(source, name, "max", tuple(EFFORTS), path=path)]


def _parse_response_format(value: object) -> ResponseFormat | None:
    if value is None:
        return None
    given = fields.as_object(value, "response_format")
    kinds = ("text", "json_object", "json_schema")
    kind = fields.read_choice(given, "type", "", kinds, path="response_format.")
    if kind == "text":
        return None
    if kind != "json_schema":
        if kind == "":
            fields.refuse("response_format.type", "is required")
        return ResponseFormat(kind=cast("Literal['json_object']", kind))
    path = "response_format.json_schema"
    wrapped = fields.as_object(given.get("json_schema"), path)
    if not fields.read_string(wrapped, "name", path=path + "."):
        fields.refuse(path + ".name", "is required")
    schema = fields.as_object(wrapped.get("schema"), path + ".schema")
    fields.read_bool(wrapped, "strict", False, path=path + ".")
    return ResponseFormat(kind="json_schema", schema=cast("JsonObject", schema))
