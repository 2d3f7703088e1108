"""Heads of requests: bounded in bytes and in time, refused in the shape of every other error."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response

from k3_gateway.http_server import MAX_HEAD_BYTES, BoundedHttp, make_server


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
