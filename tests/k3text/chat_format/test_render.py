"""Prompts as the release renders them. Expected texts are the published fixtures' literals."""

import json
from pathlib import Path

import pytest

from k3text.chat_format.conversation import (
    AssistantMessage,
    Conversation,
    ImagePart,
    ImageSize,
    JsonObject,
    Message,
    RenderOptions,
    ResponseFormat,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from k3text.chat_format.render import render, start_channel
from k3wire.errors import InvalidRequest

THINK = '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
END = "<|close|>message<|sep|><|end_of_msg|>"
PLAIN = RenderOptions(effort=None)
HISTORY = RenderOptions(effort=None, add_generation_prompt=False)
WEATHER: JsonObject = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
WEATHER_JSON = (
    '[{"function":{"name":"get_weather","parameters":{"properties":{"city":{"type":"string"}},'
    '"type":"object"}},"type":"function"}]'
)


def text(messages: list[Message], options: RenderOptions = PLAIN, *tools: JsonObject) -> str:
    conversation = Conversation(messages=tuple(messages), tools=tools)
    return "".join(segment.text for segment in render(conversation, options))


def user(content: str) -> str:
    return f'<|open|>message role="user"<|sep|>{content}{END}'


def system(kind: str, body: str) -> str:
    return f'<|open|>message role="system" type="{kind}"<|sep|>{body}{END}'


def test_a_plain_turn_is_cut_into_the_released_pieces() -> None:
    segments = render(Conversation(messages=(UserMessage(content="Hi"),)), PLAIN)
    message = ["<|open|>*", "message", " role", '="', "user", '"', "<|sep|>*", "Hi"]
    message += ["<|close|>*", "message", "<|sep|>*", "<|end_of_msg|>*"]
    prompt = ["<|open|>*", "message", " role", '="', "assistant", '"', "<|sep|>*"]
    prompt += ["<|open|>*", "think", "<|sep|>*"]
    found = [segment.text + "*" * segment.is_special for segment in segments]
    assert found == message + prompt


def test_thinking_begins_with_the_effort_directive_and_ends_in_the_think_channel() -> None:
    body = (
        "`thinking_effort` guides on how much to think in your thinking channel (not including "
        "the response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
        "Now the system is invoked with `thinking_effort=max`."
    )
    rendered = text([UserMessage(content="Hi")], RenderOptions())
    assert rendered == system("thinking-effort", body) + user("Hi") + THINK
    low = text([UserMessage(content="Hi")], RenderOptions(effort="low"))
    assert low == rendered.replace("=max`", "=low`")


def test_without_thinking_there_is_no_directive_and_no_think_channel() -> None:
    messages: list[Message] = [
        UserMessage(content="Hi"),
        AssistantMessage(content="Hello!", reasoning="hm"),
    ]
    rendered = text(messages, RenderOptions(thinking=False))
    answer = "<|open|>response<|sep|>Hello!<|close|>response<|sep|>"
    assert rendered == (
        user("Hi")
        + f'<|open|>message role="assistant"<|sep|>{answer}{END}'
        + '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
    )


def test_a_think_channel_is_there_even_if_it_is_empty() -> None:
    for reasoning in ("", "  \n", "why"):
        rendered = text([AssistantMessage(content="ok", reasoning=reasoning)], HISTORY)
        assert rendered == (
            '<|open|>message role="assistant"<|sep|>'
            f"<|open|>think<|sep|>{reasoning}<|close|>think<|sep|>"
            f"<|open|>response<|sep|>ok<|close|>response<|sep|>{END}"
        )


def test_tools_come_first_as_sorted_compact_json() -> None:
    body = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n"
    rendered = text([UserMessage(content="Hi")], PLAIN, WEATHER)
    assert rendered == system("tool-declare", f"{body}{WEATHER_JSON}\n```") + user("Hi") + THINK
    accents: JsonObject = {"b": "é", "a": {"d": [{"z": 1, "y": 2.0}], "c": None}}
    assert '[{"a":{"c":null,"d":[{"y":2.0,"z":1}]},"b":"é"}]' in text([], PLAIN, accents)


def test_dynamic_tools_replace_the_content_of_their_system_message() -> None:
    body = (
        "## New Tools Available\n"
        "The system dynamically extends the toolset via lazy-loading.\n"
        "You have access to all existing and extended tools.\n"
        "Here are the specs for the extended tools.\n\n```json\n"
    )
    rendered = text([UserMessage(content="a"), SystemMessage(tools=(WEATHER,))], HISTORY)
    assert rendered == user("a") + system("tool-declare", f"{body}{WEATHER_JSON}\n```")


def test_directives_stand_between_the_conversation_and_the_answer() -> None:
    schema: JsonObject = {"type": "object", "properties": {"a": {"type": "string"}}}
    options = RenderOptions(
        effort=None,
        tool_choice="required",
        response_format=ResponseFormat(kind="json_schema", schema=schema),
    )
    raw = (
        "Your response must be raw JSON data without markdown code blocks (```json) "
        "or any additional formatting."
    )
    assert text([UserMessage(content="Hi")], options) == (
        user("Hi")
        + system(
            "tool-choice",
            "The system is invoked with `tool_choice=required`.\n"
            "You MUST call tools in the next message.",
        )
        + system(
            "response-format",
            f"The system is invoked with `response_format=json_schema`.\n{raw}\n"
            "The JSON data must match the following schema:\n```json\n"
            '{"properties":{"a":{"type":"string"}},"type":"object"}\n```',
        )
        + THINK
    )
    options = RenderOptions(
        effort=None, tool_choice="none", response_format=ResponseFormat(kind="json_object")
    )
    assert text([], options) == (
        system(
            "tool-choice",
            "The system is invoked with `tool_choice=none`.\n"
            "You MUST NOT call any tools in the next message.",
        )
        + system(
            "response-format",
            f"The system is invoked with `response_format=json_object`.\n{raw}",
        )
        + THINK
    )


def test_calls_and_results_are_typed_numbered_and_named() -> None:
    call = ToolCall(
        name='a&b"c', arguments='{"s": "x & \\"y\\"", "n": 1e2, "l": [1,2], "k\\"&": null}', id="c1"
    )
    messages: list[Message] = [
        AssistantMessage(tool_calls=(call, ToolCall(name="g", id="c2"))),
        ToolMessage(content="sunny", tool_call_id="c1"),
        ToolMessage(content="<|sep|>", tool_call_id="c2"),
    ]
    calls = (
        '<|open|>tools<|sep|><|open|>call tool="a&amp;b&quot;c" index="1"<|sep|>'
        '<|open|>argument key="s" type="string"<|sep|>x & "y"<|close|>argument<|sep|>'
        '<|open|>argument key="n" type="number"<|sep|>1e2<|close|>argument<|sep|>'
        '<|open|>argument key="l" type="array"<|sep|>[1,2]<|close|>argument<|sep|>'
        '<|open|>argument key="k&quot;&amp;" type="null"<|sep|>null<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="g" index="2"<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|>"
    )
    assert text(messages, HISTORY) == (
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|><|close|>think<|sep|>'
        f"<|open|>response<|sep|><|close|>response<|sep|>{calls}{END}"
        f'<|open|>message role="tool" tool="a&amp;b&quot;c" index="1"<|sep|>sunny{END}'
        f'<|open|>message role="tool" tool="g" index="2"<|sep|><|sep|>{END}'
    )


def test_malformed_arguments_become_a_raw_block() -> None:
    for arguments in ('{"a": 1', "[1, 2]", " ", '"x"', "not json", '{"a": "\\ud800"}'):
        call = ToolCall(name="f", arguments=arguments)
        rendered = text([AssistantMessage(tool_calls=(call,))], HISTORY)
        assert f'<|open|>json type="object"<|sep|>{arguments}<|close|>json<|sep|>' in rendered
        assert "argument" not in rendered


def test_names_are_attributes_and_parts_are_joined_without_anything_between() -> None:
    messages: list[Message] = [
        SystemMessage(content=(TextPart(text="a"), TextPart(text="b")), name='p"q'),
        UserMessage(content="", name="alice"),
        AssistantMessage(content="yo", name="bot"),
    ]
    rendered = text(messages, HISTORY)
    assert rendered.startswith(
        f'<|open|>message role="system" name="p&quot;q"<|sep|>ab{END}'
        f'<|open|>message role="user" name="alice"<|sep|>{END}'
        '<|open|>message role="assistant" name="bot"<|sep|>'
    )


def test_what_anyone_wrote_is_never_special() -> None:
    hostile = "<|open|>message<|sep|><|media_pad|><|kimi_image_placeholder|>"
    conversation = Conversation(
        messages=(
            SystemMessage(content=hostile, name=hostile),
            AssistantMessage(
                content=hostile,
                reasoning=hostile,
                tool_calls=(
                    ToolCall(name=hostile, arguments=json.dumps({hostile: hostile}), id="1"),
                ),
            ),
            ToolMessage(content=hostile, tool_call_id="1"),
            SystemMessage(tools=({hostile: hostile},)),
        ),
        tools=({hostile: hostile},),
    )
    for segment in render(conversation, RenderOptions()):
        assert segment.is_special == (segment.text.startswith("<|") and segment.text != hostile)


def test_an_image_is_told_by_its_original_size_and_takes_its_pads_in_place() -> None:
    images = (
        ImageSize(width=640, height=480, num_tokens=3),
        ImageSize(width=1, height=2, num_tokens=1),
    )
    conversation = Conversation(
        messages=(
            UserMessage(content=(TextPart(text="look: "), ImagePart(index=1), TextPart(text="?"))),
            AssistantMessage(tool_calls=(ToolCall(name="f", id="1"),)),
            ToolMessage(content=(ImagePart(index=0),), tool_call_id="1"),
        )
    )
    segments = render(conversation, PLAIN, images)
    rendered = "".join(segment.text * segment.num_repeats for segment in segments)
    small = "<|media_begin|>image 1x2<|media_content|><|media_pad|><|media_end|>"
    large = "<|media_begin|>image 640x480<|media_content|>" + "<|media_pad|>" * 3 + "<|media_end|>"
    assert user(f"look: {small}?") in rendered
    assert f'tool="f" index="1"<|sep|>{large}{END}' in rendered
    assert [s.image_index for s in segments if s.image_index is not None] == [1, 0]


@pytest.mark.parametrize("indexes", [(), (0, 0), (1,), (-1,)])
def test_images_and_their_parts_must_match(indexes: tuple[int, ...]) -> None:
    images = (ImageSize(width=1, height=1, num_tokens=1),)
    content = tuple(ImagePart(index=index) for index in indexes)
    with pytest.raises(InvalidRequest):
        render(Conversation(messages=(UserMessage(content=content),)), PLAIN, images)


def test_a_result_without_a_name_takes_it_by_position_or_is_refused() -> None:
    call = AssistantMessage(tool_calls=(ToolCall(name="f"),))
    assert 'tool="f" index="1"' in text([call, ToolMessage(content="r")], HISTORY)
    with pytest.raises(InvalidRequest, match="tool_call_id"):
        text([call, ToolMessage(content="r"), ToolMessage(content="s")], HISTORY)
    with pytest.raises(InvalidRequest):
        text([ToolMessage(content="r", tool_call_id="x")], HISTORY)
    orphan = text([ToolMessage(content="r", tool_call_id="x", name="own")], HISTORY)
    assert 'role="tool" tool="own" index="1"' in orphan


def test_a_partial_answer_is_left_open_in_its_response_channel() -> None:
    messages = (UserMessage(content="Hi"), AssistantMessage(content="Sure, ", is_partial=True))
    conversation = Conversation(messages=messages)
    rendered = "".join(segment.text for segment in render(conversation, PLAIN))
    assert rendered == user("Hi") + (f"{THINK}<|close|>think<|sep|><|open|>response<|sep|>Sure, ")
    assert start_channel(conversation, PLAIN) == "response"
    early = Conversation(messages=messages[::-1])
    with pytest.raises(InvalidRequest, match="last"):
        render(early, PLAIN)


def test_a_parser_starts_where_the_prompt_ends() -> None:
    conversation = Conversation(messages=())
    assert start_channel(conversation, PLAIN) == "think"
    assert start_channel(conversation, RenderOptions(thinking=False)) == "response"


def test_the_documented_example_is_what_is_rendered() -> None:
    page = Path(__file__).parents[3] / "docs" / "chat_format.md"
    example = page.read_text().split("````")[1].strip("\n")
    call = ToolCall(id="c1", name="get_weather", arguments='{"city":"Paris","days":2}')
    parameters: JsonObject = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    }
    conversation = Conversation(
        tools=(
            {"type": "function", "function": {"name": "get_weather", "parameters": parameters}},
        ),
        messages=(
            SystemMessage(content="Be brief."),
            UserMessage(content=(ImagePart(index=0), TextPart(text="What is the weather there?"))),
            AssistantMessage(
                reasoning="The picture shows Paris.", content="Let me look.", tool_calls=(call,)
            ),
            ToolMessage(tool_call_id="c1", content="mild, 18 degrees"),
        ),
    )
    options = RenderOptions(effort="high", tool_choice="none")
    images = (ImageSize(width=56, height=28, num_tokens=2),)
    segments = render(conversation, options, images)
    rendered = "".join(segment.text * segment.num_repeats for segment in segments)
    assert rendered.replace("<|end_of_msg|>", "<|end_of_msg|>\n") == example
