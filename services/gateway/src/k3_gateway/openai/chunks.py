"""Answers in OpenAI's words: chunks of a stream and the body of a whole one.

Both are made from the same events, so that they cannot differ. Chunks are bytes, with everything
that does not change encoded once a request.
"""

import secrets

import msgspec

from k3_gateway.answer import PublicFinish
from k3_gateway.openai.errors import error_body
from k3text.parsers.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from k3wire.errors import K3Error
from k3wire.telemetry.ledger import Ledger

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class Usage(msgspec.Struct, frozen=True, kw_only=True, tag="usage"):
    """Tokens of one request, counted once whatever happened to it.

    Attributes:
        num_prompt_tokens: image pads included.
        num_cached_tokens: of the prompt, not computed.
        num_image_tokens: of the prompt, pads of images.
        num_output_tokens: reasoning included.
        num_reasoning_tokens: of the output.
        ledger: time to first token by stage and tier, for whoever wants to see it.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_image_tokens: int
    num_output_tokens: int
    num_reasoning_tokens: int
    ledger: Ledger | None = None

    def body(self) -> dict[str, object]:
        """Gives OpenAI's usage object, with Moonshot's and our additions."""
        usage: dict[str, object] = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "cached_tokens": self.num_cached_tokens,
            "prompt_tokens_details": {
                "cached_tokens": self.num_cached_tokens,
                "image_tokens": self.num_image_tokens,
            },
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
        }
        if self.ledger is not None:
            usage["k3_ttft_ledger"] = self.ledger
        return usage


def new_call_id() -> str:
    """Mints a tool-call id: opaque, unique in any conversation, within `[A-Za-z0-9_-]{1,64}`."""
    return f"call_{secrets.token_hex(12)}"


class ChunkEncoder:
    """Encodes the chunks of one streamed choice."""

    def __init__(
        self, request_id: str, model: str, fingerprint: str, created_s: int, *, has_usage: bool
    ) -> None:
        """Prepares what all chunks share.

        Args:
            request_id: becomes the answer's id.
            model: as asked for.
            fingerprint: of the served checkpoint.
            created_s: Unix time.
            has_usage: the client asked for a usage chunk.
        """
        self._has_usage = has_usage
        head = {
            "id": f"chatcmpl-{request_id}",
            "object": "chat.completion.chunk",
            "created": created_s,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        encoded = msgspec.json.encode(head)[:-1]
        self._head = b"data: " + encoded
        self._open = self._head + b',"choices":[{"index":0,"delta":'
        self._close = b',"logprobs":null,"finish_reason":null}]' + self._null_usage() + b"}\n\n"

    def _null_usage(self) -> bytes:
        return b',"usage":null' if self._has_usage else b""

    def first(self) -> bytes:
        """The chunk that opens the choice."""
        delta = b'{"role":"assistant","content":"","refusal":null}'
        return self._open + delta + self._close

    def event(self, event: Event) -> bytes:
        """The chunk of one event; empty bytes where there is nothing to say."""
        delta = _delta_of(event)
        return self._open + msgspec.json.encode(delta) + self._close if delta else b""

    def last(self, finish: PublicFinish, usage: Usage) -> bytes:
        """The finish chunk, with usage in the choice as Moonshot's clients read it."""
        rest = {"logprobs": None, "finish_reason": finish, "usage": usage.body()}
        tail = b"," + msgspec.json.encode(rest)[1:] + b"]" + self._null_usage() + b"}\n\n"
        return self._open + b"{}" + tail

    def usage(self, usage: Usage) -> bytes:
        """The usage chunk, or empty bytes if it was not asked for."""
        if not self._has_usage:
            return b""
        body = msgspec.json.encode({"choices": [], "usage": usage.body()})
        return self._head + b"," + body[1:] + b"\n\n"

    @staticmethod
    def error(error: K3Error) -> bytes:
        """The in-band error that ends a broken stream; neither finish chunk nor `[DONE]` follow."""
        return b"data: " + error_body(error) + b"\n\n"


def _delta_of(event: Event) -> dict[str, object] | None:
    match event:
        case ReasoningDelta(text=text):
            return {"reasoning_content": text} if text else None
        case ContentDelta(text=text):
            return {"content": text} if text else None
        case ToolCallStart(index=index, name=name):
            function: dict[str, object] = {"name": name, "arguments": ""}
            call: dict[str, object] = {"index": index, "id": new_call_id(), "type": "function"}
            return {"tool_calls": [call | {"function": function}]}
        case ToolCallArgumentsDelta(index=index, text=text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case ToolCallEnd():
            return None


class BodyBuilder:
    """Assembles a whole answer from the same events."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[dict[str, object]] = []
        self._arguments: list[list[str]] = []
        self._is_complete: list[bool] = []

    def add(self, event: Event) -> None:
        """Takes one event."""
        match event:
            case ReasoningDelta(text=text):
                self._reasoning.append(text)
            case ContentDelta(text=text):
                self._content.append(text)
            case ToolCallStart(name=name):
                self._calls.append({"id": new_call_id(), "type": "function", "name": name})
                self._arguments.append([])
                self._is_complete.append(False)
            case ToolCallArgumentsDelta(index=index, text=text):
                self._arguments[index].append(text)
            case ToolCallEnd(index=index, is_complete=is_complete):
                self._is_complete[index] = is_complete

    def message(self) -> dict[str, object]:
        """Gives the assistant message; a call that was cut is left out."""
        calls = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": "".join(parts)},
            }
            for call, parts, is_complete in zip(
                self._calls, self._arguments, self._is_complete, strict=True
            )
            if is_complete
        ]
        content = "".join(self._content)
        message: dict[str, object] = {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
        }
        reasoning = "".join(self._reasoning)
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def body(
        self, request_id: str, model: str, fingerprint: str, created_s: int, end: PublicFinish
    ) -> dict[str, object]:
        """Gives the response body, without usage."""
        choice = {
            "index": 0,
            "message": self.message(),
            "logprobs": None,
            "finish_reason": end,
        }
        return {
            "id": f"chatcmpl-{request_id}",
            "object": "chat.completion",
            "created": created_s,
            "model": model,
            "system_fingerprint": fingerprint,
            "choices": [choice],
        }
