"""Chat requests as clients send them: what is read, what is refused, and by which name."""

from typing import Any

import pytest

from k3_gateway.chat_request import bodies
from k3_gateway.chat_request.bodies import check_headers, decode_object
from k3_gateway.chat_request.messages import parse_messages
from k3_gateway.chat_request.params import parse_options
from k3_gateway.chat_request.tools import parse_render_options, parse_tools
from k3text.chat_format.conversation import (
    AssistantMessage,
    ImagePart,
    SystemMessage,
    TextPart,
    ToolMessage,
    UserMessage,
)
from k3wire.errors import (
    ImageFileTooLarge,
    InvalidJson,
    InvalidRequest,
    RequestTooLarge,
    TooManyImages,
    UnsupportedContentPart,
    UnsupportedMediaType,
    UnsupportedParameter,
)


def options(**fields: Any) -> Any:
    return parse_options({"model": "k3", **fields})


def messages(*items: Any, max_images: int = 4) -> Any:
    return parse_messages({"messages": list(items)}, max_images)


def test_defaults_are_the_vendors_and_null_equals_absent() -> None:
    nulls = dict.fromkeys(("temperature", "top_p", "stop", "n", "seed", "stream", "tools"))
    for given in ({}, nulls):
        parsed = options(**given)
        assert (parsed.sampling.temperature, parsed.sampling.top_p) == (1.0, 0.95)
        assert (parsed.stops, parsed.is_stream, parsed.max_tokens) == ((), False, None)


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    assert options(max_completion_tokens=7, max_tokens=9).max_tokens == 7
    assert options(max_tokens=9).max_tokens == 9


def test_a_given_seed_is_kept_and_an_absent_one_is_drawn() -> None:
    assert options(seed=-5).sampling.seed == -5
    assert options().sampling.seed != options().sampling.seed


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 1 << 64}, "seed"),
        ({"stop": ["a"] * 6}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"model": 3}, "model"),
    ],
)
def test_values_out_of_range_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        options(**fields)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    "fields",
    [{"n": 2}, {"logprobs": True}, {"functions": []}, {"audio": {}}, {"modalities": ["audio"]}],
)
def test_what_is_not_served_is_refused_not_ignored(fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedParameter):
        options(**fields)


def test_unknown_and_harmless_fields_are_ignored() -> None:
    assert options(user="u", metadata={"a": 1}, store=True, made_up=[1]).model == "k3"


def test_roles_and_parts_become_the_conversation() -> None:
    parsed = messages(
        {"role": "developer", "content": "be brief"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what"},
                {"type": "image_url", "image_url": {"url": "http://a/b.png", "detail": "low"}},
                {"type": "input_image", "image_url": "data:image/png;base64,AA"},
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "reasoning": "hm",
            "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    )
    system, user, assistant, tool = parsed.messages
    assert system == SystemMessage(content="be brief")
    parts = (TextPart(text="what"), ImagePart(index=0), ImagePart(index=1))
    assert user == UserMessage(content=parts)
    assert isinstance(assistant, AssistantMessage)
    assert (assistant.reasoning, assistant.tool_calls[0].arguments) == ("hm", '{"a": 1}')
    assert tool == ToolMessage(content="done", tool_call_id="c1")
    assert [image.param for image in parsed.images] == [
        "messages[1].content[1].image_url",
        "messages[1].content[2].image_url",
    ]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "function", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "assistant", "content": None}, "messages[0].content"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ("hello", "messages[0]"),
    ],
)
def test_a_bad_message_is_named_by_its_path(item: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        messages(item)
    assert caught.value.param == param


def test_no_messages_too_many_images_and_strange_parts_are_refused() -> None:
    image = {"type": "image_url", "image_url": {"url": "http://a"}}
    with pytest.raises(InvalidRequest):
        messages()
    with pytest.raises(TooManyImages):
        messages({"role": "user", "content": [image] * 3}, max_images=2)
    with pytest.raises(UnsupportedContentPart):
        messages({"role": "user", "content": [{"type": "video_url", "video_url": {}}]})


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


@pytest.mark.parametrize("name", ["a", "_x-y.z", "get_weather", "mcp.server-tool"])
def test_tool_names_that_clients_use_are_taken(name: str) -> None:
    assert len(parse_tools([function(name)], "tools")) == 1


@pytest.mark.parametrize("name", ["", "1a", "a b", "a\n", "x" * 257, "a/b"])
def test_tool_names_outside_the_alphabet_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_tools([function(name)], "tools")


def test_a_tool_declared_twice_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        parse_tools([function("a"), function("a")], "tools")


@pytest.mark.parametrize(
    ("body", "thinking", "effort"),
    [
        ({}, True, "max"),
        ({"reasoning_effort": "low"}, True, "low"),
        ({"reasoning_effort": "none"}, False, "max"),
        ({"thinking": {"type": "disabled", "effort": "low"}}, False, "low"),
        ({"thinking": {"effort": "high"}, "reasoning_effort": "low"}, True, "high"),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, True, "max"),
        ({"chat_template_kwargs": {"thinking": False}, "reasoning_effort": "low"}, False, "max"),
        ({"chat_template_kwargs": {"thinking_effort": "low"}}, True, "low"),
        ({"reasoning_effort": "medium"}, True, "high"),
    ],
)
def test_reasoning_controls_follow_their_precedence(
    body: dict[str, Any], thinking: bool, effort: str
) -> None:
    parsed = parse_render_options(body, has_tools=False)
    assert (parsed.thinking, parsed.effort) == (thinking, effort)


@pytest.mark.parametrize(
    "body",
    [
        {"reasoning_effort": "huge"},
        {"chat_template_kwargs": {"evil": 1}},
        {"tool_choice": "bogus"},
        {"tool_choice": "required"},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": 1}}},
    ],
)
def test_bad_controls_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        parse_render_options(body, has_tools=False)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"a": NaN}',
        b'{"a": 1} x',
        b'{"a": "\\ud800"}',
        b"[" * 4000 + b"]" * 4000,
        b'{"a":' * 100 + b"1" + b"}" * 100,
        b'{"a": "\xff"}',
        b'{"a": 1e999}',
    ],
)
def test_bodies_that_are_no_sound_json_object_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidJson):
        decode_object(body, 1000)


def test_a_body_without_its_pictures_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_TEXT_BYTES", 100_000)
    with pytest.raises(RequestTooLarge):
        decode_object(b'{"a": "' + b"x" * 100_000 + b'"}', 1_000_000)
    picture = b"data:image/png;base64," + b"A" * 100_000
    found = decode_object(b'{"a": ["' + picture + b'"]}', 200_000)
    assert found == {"a": [picture.decode()]}
    with pytest.raises(ImageFileTooLarge):
        decode_object(b'{"a": "' + picture + b'"}', 100_000)


@pytest.mark.parametrize(
    ("headers", "error"),
    [
        ({"content-type": "text/plain"}, UnsupportedMediaType),
        ({}, UnsupportedMediaType),
        (
            {"content-type": "application/json", "content-encoding": "gzip"},
            UnsupportedMediaType,
        ),
        ({"content-type": "application/json", "content-length": "2000"}, RequestTooLarge),
        ({"content-type": "application/json", "content-length": "9" * 5000}, RequestTooLarge),
        ({"content-type": "application/json", "content-length": "\u00b2"}, InvalidJson),
        ({"content-type": "application/json", "content-length": "-1"}, InvalidJson),
    ],
)
def test_headers_alone_can_refuse_a_body(headers: dict[str, str], error: type[Exception]) -> None:
    with pytest.raises(error):
        check_headers(headers, 1000)
