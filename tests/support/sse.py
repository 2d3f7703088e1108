"""Chat answers as a client sees them, and the rules that every stream of chunks must keep."""

import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp

SHARED = ("id", "object", "created", "model", "system_fingerprint")
ORDER = ("reasoning_content", "content", "tool_calls")
MARKS = ("<|", "|>", "open|", "close|", "sep|")


@dataclass(slots=True)
class Answered:
    """One answer, streamed or whole."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    finish: str = ""
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    has_usage_chunk: bool = False
    num_comments: int = 0

    @property
    def num_output_tokens(self) -> int:
        return self.usage["completion_tokens"]

    @property
    def num_reasoning_tokens(self) -> int:
        return self.usage["completion_tokens_details"]["reasoning_tokens"]

    @property
    def seen(self) -> tuple[object, ...]:
        """All that must not depend on how the answer travelled."""
        return self.reasoning, self.content, self.calls, self.finish, self.num_reasoning_tokens


def whole_answer(body: dict[str, Any]) -> Answered:
    """Reads a whole answer."""
    (choice,) = body["choices"]
    message = choice["message"]
    assert message["role"] == "assistant"
    calls = message.get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    found = Answered(
        reasoning=message.get("reasoning_content", ""),
        content=message["content"] or "",
        calls=[(call["function"]["name"], call["function"]["arguments"]) for call in calls],
        finish=choice["finish_reason"],
        usage=body["usage"],
    )
    check_marks(found)
    return found


async def read_stream(response: aiohttp.ClientResponse, head: bytes = b"") -> Answered:
    """Reads a stream to its end and checks every rule.

    Args:
        response: with its status line read.
        head: what was read of it already.
    """
    assert response.status == 200, await response.text()
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    blocks = (head + await response.content.read()).decode().split("\n\n")
    assert blocks.pop() == ""
    comments = [block for block in blocks if block.startswith(":")]
    texts = [block for block in blocks if not block.startswith(":")]
    assert all(text.startswith("data: ") and "\n" not in text for text in texts)
    assert texts.pop() == "data: [DONE]"
    chunks = [json.loads(text.removeprefix("data: ")) for text in texts]
    found = read_chunks(chunks)
    found.num_comments = len(comments)
    return found


def read_chunks(chunks: list[dict[str, Any]]) -> Answered:
    """Joins chunks, checking each."""
    found = Answered()
    assert all([chunk[name] for name in SHARED] == [chunks[0][name] for name in SHARED] for chunk in chunks)  # fmt: skip
    if not chunks[-1]["choices"]:
        found.has_usage_chunk = True
        usage = chunks.pop()["usage"]
        assert all("usage" in chunk and chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    last = chunks.pop()["choices"][0]
    assert last["delta"] == {}
    found.finish, found.usage = last["finish_reason"], last["usage"]
    assert not found.has_usage_chunk or usage == found.usage
    assert found.usage["total_tokens"] == found.usage["prompt_tokens"] + found.num_output_tokens
    first = chunks.pop(0)["choices"][0]
    assert first["delta"] == {"role": "assistant", "content": "", "refusal": None}
    place = 0
    ids: list[str] = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert choice["index"] == 0
        assert choice["finish_reason"] is None
        ((kind, value),) = choice["delta"].items()
        assert value, "an empty delta"
        assert ORDER.index(kind) >= place, "a kind came back"
        place = ORDER.index(kind)
        match kind:
            case "reasoning_content":
                found.reasoning += value
            case "content":
                found.content += value
            case _:
                (delta,) = value
                _take_call(found, ids, delta)
    assert len(set(ids)) == len(ids)
    check_marks(found)
    return found


def _take_call(found: Answered, ids: list[str], delta: dict[str, Any]) -> None:
    function = delta["function"]
    if delta["index"] == len(found.calls):
        assert delta["type"] == "function"
        assert function["arguments"] == ""
        ids.append(delta["id"])
        found.calls.append((function["name"], ""))
        return
    assert set(delta) == {"index", "function"}
    assert set(function) == {"arguments"}
    assert function["arguments"], "an empty delta"
    name, text = found.calls[delta["index"]]
    found.calls[delta["index"]] = (name, text + function["arguments"])


def check_marks(found: Answered) -> None:
    """Nothing of a marker may be seen."""
    texts = (found.reasoning, found.content, *(part for call in found.calls for part in call))
    assert not any(mark in text for text in texts for mark in MARKS)
