"""Heads of requests: bounded in bytes and in time, refused in the shape of every other error."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response

from k3_gateway.http_server import (
    MAX_HEAD_BYTES,
    MAX_HELD_BYTES,
    BoundedHttp,
    GatheringTransport,
    make_server,
)


@asynccontextmanager
async def serving() -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter], None]:
    """A connection to a server that answers with the size of the body."""
    app = FastAPI()

    async def measure(request: Request) -> Response:
        return Response(str(len(await request.body())))

    app.add_route("/", measure, methods=["POST"])
    server = make_server(app, "127.0.0.1", 0, 1.0)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event
            await asyncio.sleep(0)
        port = server.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield reader, writer
        finally:
            writer.close()
            server.should_exit = True


def head(num_bytes: int, length: int = 0) -> bytes:
    return (
        f"POST / HTTP/1.1\r\nhost: x\r\nx-a: {'a' * num_bytes}\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


async def refused(reader: asyncio.StreamReader) -> None:
    status, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    assert status.startswith("HTTP/1.1 400 ")
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


async def test_heads_within_the_bound_and_bodies_past_it_are_served() -> None:
    async with serving() as (reader, writer):
        for _ in range(2):
            length = 3 * MAX_HEAD_BYTES
            writer.write(head(MAX_HEAD_BYTES - 500, length) + b"b" * length)
            found = await reader.readuntil(b"\r\n\r\n")
            assert found.startswith(b"HTTP/1.1 200 ")
            assert await reader.readexactly(6) == str(length).encode()


@pytest.mark.parametrize(
    "data",
    [head(MAX_HEAD_BYTES), head(MAX_HEAD_BYTES)[:-4], b"POST /" + b"a" * MAX_HEAD_BYTES],
    ids=["whole", "endless header", "endless path"],
)
async def test_a_head_past_the_bound_is_refused(data: bytes) -> None:
    async with serving() as (reader, writer):
        writer.write(data)
        await refused(reader)


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x02\r\n\r\n", head(1).replace(b"length: 0", b"length: -1")]
)
async def test_what_is_no_http_is_refused(data: bytes) -> None:
    async with serving() as (reader, writer):
        writer.write(data)
        await refused(reader)


@pytest.mark.parametrize("data", [b"", head(1)[:-4]])
async def test_a_head_that_never_ends_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(BoundedHttp, "head_timeout_s", 0.05)
    async with serving() as (reader, writer):
        writer.write(data)
        assert await reader.read() == b""


async def test_a_body_that_goes_on_after_its_answer_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BoundedHttp, "rest_timeout_s", 0.05)
    async with serving() as (reader, writer):
        # Refused by its path, before its body is here; a byte now and then keeps it alive no more.
        writer.write(head(1, 1000).replace(b"POST /", b"POST /nowhere"))
        found = await reader.readuntil(b"\r\n\r\n")
        assert found.startswith(b"HTTP/1.1 404 ")
        ending = asyncio.get_running_loop().create_task(reader.read())
        while not ending.done():
            writer.write(b"b")
            await asyncio.wait([ending], timeout=0.01)


async def test_the_rest_of_a_refused_body_may_be_followed_by_another_request() -> None:
    async with serving() as (reader, writer):
        writer.write(head(1, 3).replace(b"POST /", b"POST /nowhere"))
        assert b" 404 " in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"bbb" + head(1, 2) + b"bb")
        assert b"HTTP/1.1 200 " in await reader.readuntil(b"\r\n\r\n")


class Wire:
    """A transport that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        assert not self.is_closed
        self.calls.append(data)

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


async def test_writes_of_one_turn_are_one_call_and_of_two_are_two() -> None:
    wire = Wire()
    transport = GatheringTransport(wire, asyncio.get_running_loop())
    for data in (b"head", b"one", b"end"):
        transport.write(data)
    assert wire.calls == []
    await asyncio.sleep(0)
    transport.write(b"two")
    await asyncio.sleep(0)
    assert wire.calls == [b"headoneend", b"two"]


async def test_what_is_held_leaves_before_the_close_and_nothing_after_it() -> None:
    wire = Wire()
    transport = GatheringTransport(wire, asyncio.get_running_loop())
    transport.write(b"last")
    transport.close()
    assert (wire.calls, transport.is_closing()) == ([b"last"], True)
    transport.write(b"late")
    await asyncio.sleep(0)
    assert wire.calls == [b"last"]


async def test_a_fast_writer_is_not_held_back_for_ever() -> None:
    wire = Wire()
    transport = GatheringTransport(wire, asyncio.get_running_loop())
    transport.write(b"a" * MAX_HELD_BYTES)
    transport.write(b"b")
    assert sum(map(len, wire.calls)) == MAX_HELD_BYTES + 1
