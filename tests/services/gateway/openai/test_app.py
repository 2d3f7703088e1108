"""What the chat route owes a stream that is never read, and errors their headers."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import Request
from fastapi.responses import StreamingResponse

from k3_gateway.openai.app import ChatEndpoint
from k3_gateway.openai.chat_completions import ChatAnswer
from k3_gateway.openai.errors import error_response
from k3wire.errors import (
    DeadlineExceeded,
    K3Error,
    NoResponders,
    Overloaded,
    SlowDown,
    Unauthorized,
)


class Chat:
    """A service whose stream never ends."""

    def __init__(self, failure: K3Error | None = None) -> None:
        self.failure = failure
        self.ends: list[str] = []

    async def create(self, request: Request, request_id: str) -> ChatAnswer:
        if self.failure is not None:
            raise self.failure

        async def chunks() -> AsyncIterator[bytes]:
            while True:
                yield b"data: x\n\n"
                await asyncio.sleep(0)

        async def close(code: str) -> None:
            self.ends.append(code)

        return ChatAnswer(StreamingResponse(chunks()), close)


async def ask(chat: Chat, num_chunks: int) -> list[dict[str, Any]]:
    """Asks as a server would, for a client that leaves after some chunks."""
    sent: list[dict[str, Any]] = []
    has_left = asyncio.Event()
    if num_chunks == 0:
        has_left.set()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)
        if len(sent) > num_chunks:
            has_left.set()

    async def receive() -> dict[str, Any]:
        # A server that knows already does not wait.
        if not has_left.is_set():
            await has_left.wait()
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "POST", "headers": [(b"x-request-id", b"mine")]}
    async with asyncio.timeout(5):
        await ChatEndpoint(chat)(scope, receive, send)
    return sent


async def test_a_client_that_reads_no_more_gives_its_place_up() -> None:
    chat = Chat()

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    scope = {"type": "http", "method": "POST", "headers": []}
    async with asyncio.timeout(5):
        await ChatEndpoint(chat, write_stall_s=0.01)(scope, receive, send)
    assert chat.ends == ["client_closed"]


@pytest.mark.parametrize("num_chunks", [0, 3])
async def test_a_stream_is_closed_even_if_nobody_reads_it(num_chunks: int) -> None:
    chat = Chat()
    await ask(chat, num_chunks)
    assert chat.ends == ["client_closed"]


async def test_an_error_keeps_the_clients_request_id() -> None:
    start, sent = await ask(Chat(SlowDown("later")), 2)
    headers = dict(start["headers"])
    assert (start["status"], headers[b"x-request-id"]) == (429, b"mine")
    assert json.loads(sent["body"])["error"]["code"] == "slow_down"


@pytest.mark.parametrize("error", [SlowDown("a"), Overloaded("b"), NoResponders("c")])
def test_whoever_may_come_back_is_told_when(error: K3Error) -> None:
    assert int(error_response(error).headers["retry-after"]) >= 1


def test_long_jobs_are_not_sent_again_and_keys_are_asked_for() -> None:
    late = error_response(DeadlineExceeded("late"))
    assert (late.status_code, late.headers["x-should-retry"]) == (504, "false")
    assert "retry-after" not in late.headers
    assert error_response(Unauthorized("who")).headers["www-authenticate"] == "Bearer"
