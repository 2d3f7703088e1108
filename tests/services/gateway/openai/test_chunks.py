"""Chunks and whole bodies: the same events make the same answer, in OpenAI's shape."""

import json
from typing import Any

import pytest
from support.sse import read_chunks, whole_answer

from k3_gateway.openai.chunks import BodyBuilder, ChunkEncoder, Usage
from k3text.parsers.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from k3wire.errors import SlowDown

USAGE = Usage(
    num_prompt_tokens=7,
    num_cached_tokens=2,
    num_image_tokens=1,
    num_output_tokens=5,
    num_reasoning_tokens=3,
)
EVENTS: list[Event] = [
    ReasoningDelta(text="h"),
    ReasoningDelta(text=""),
    ReasoningDelta(text='m"\n'),
    ContentDelta(text="你"),
    ContentDelta(text=""),
    ContentDelta(text="好"),
    ToolCallStart(index=0, name="f"),
    ToolCallArgumentsDelta(index=0, text='{"a":'),
    ToolCallArgumentsDelta(index=0, text="1}"),
    ToolCallEnd(index=0),
    ToolCallStart(index=1, name="g"),
    ToolCallArgumentsDelta(index=1, text="{}"),
    ToolCallEnd(index=1),
]


def chunks_of(events: list[Event], *, has_usage: bool) -> list[dict[str, Any]]:
    encoder = ChunkEncoder("r", "m", "f", 9, has_usage=has_usage)
    pieces = [encoder.first(), *map(encoder.event, events)]
    data = b"".join((*pieces, encoder.last("tool_calls", USAGE), encoder.usage(USAGE)))
    blocks = data.decode().split("\n\n")
    assert blocks.pop() == ""
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def body_of(events: list[Event]) -> dict[str, Any]:
    builder = BodyBuilder()
    for event in events:
        builder.add(event)
    return builder.body("r", "m", "f", 9, "tool_calls") | {"usage": USAGE.body()}


@pytest.mark.parametrize("has_usage", [True, False])
def test_the_stream_joined_is_the_whole_answer(has_usage: bool) -> None:
    streamed = read_chunks(chunks_of(EVENTS, has_usage=has_usage))
    whole = whole_answer(body_of(EVENTS))
    assert streamed.seen == whole.seen
    assert (whole.reasoning, whole.content) == ('hm"\n', "你好")
    assert whole.calls == [("f", '{"a":1}'), ("g", "{}")]
    assert streamed.has_usage_chunk == has_usage
    assert streamed.usage == whole.usage


def test_usage_has_every_field_that_clients_look_for() -> None:
    assert USAGE.body() == {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "total_tokens": 12,
        "cached_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 2, "image_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }


def test_a_call_that_was_cut_is_not_in_a_whole_answer() -> None:
    cut = [*EVENTS[:-1], ToolCallEnd(index=1, is_complete=False)]
    assert whole_answer(body_of(cut)).calls == [("f", '{"a":1}')]


def test_content_is_null_only_beside_calls() -> None:
    nothing = body_of([])["choices"][0]["message"]
    assert nothing == {"role": "assistant", "content": "", "refusal": None}
    calls = body_of(EVENTS[6:10])["choices"][0]["message"]
    assert calls["content"] is None


def test_an_error_in_the_stream_has_all_four_keys() -> None:
    data = ChunkEncoder.error(SlowDown("later"))
    assert json.loads(data.removeprefix(b"data: ")) == {
        "error": {
            "message": "later",
            "type": "rate_limit_error",
            "param": None,
            "code": "slow_down",
        }
    }
