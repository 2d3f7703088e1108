"""What only a broker can do to us: vanish, keep late messages, and be watched."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import propagate
from support.nats_server import nats_server

from k3wire import subjects
from k3wire.bus import codec
from k3wire.bus.base import Headers
from k3wire.bus.nats_bus import DEADLINE_HEADER, NatsBus
from k3wire.errors import DeadlineExceeded, InternalError, NoResponders, TierUnavailable
from k3wire.messages.base import MAX_MESSAGE_BYTES, PieceReply, PieceRequest
from k3wire.messages.control import Cancel
from k3wire.telemetry.tracing import Tracing

SUBJECT = "k3.test.piece"


def piece() -> PieceRequest:
    return PieceRequest(digest=b"d", offset=0, size_bytes=1, deadline_unix_ns=0)


def in_s(seconds: float) -> int:
    return time.time_ns() + int(seconds * 1e9)


async def ask(bus: NatsBus, seconds: float = 5) -> PieceReply:
    return await bus.call(SUBJECT, subjects.PIECE, piece(), in_s(seconds))


async def test_calls_under_way_fail_when_the_server_dies_and_later_ones_at_once(
    tmp_path: Path,
) -> None:
    started = asyncio.Event()

    async def hang(request: PieceRequest, headers: Headers) -> PieceReply:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with nats_server(tmp_path) as url:
        bus = await NatsBus.connect(url, "test")
        await bus.serve(SUBJECT, subjects.PIECE, hang)
        running = asyncio.get_running_loop().create_task(ask(bus, 60))
        async with asyncio.timeout(5):
            await started.wait()
    async with asyncio.timeout(5):
        with pytest.raises(NoResponders):
            await running
        with pytest.raises(NoResponders):
            await ask(bus, 60)
    await bus.close()


async def test_no_server_at_all_is_said_at_the_start() -> None:
    async with asyncio.timeout(10):
        with pytest.raises(TierUnavailable):
            await NatsBus.connect("nats://127.0.0.1:1", "test")


async def test_a_late_request_is_dropped_unread(tmp_path: Path) -> None:
    handled: list[int] = []

    async def count(request: PieceRequest, headers: Headers) -> PieceReply:
        handled.append(request.offset)
        return PieceReply(data=b"")

    async with nats_server(tmp_path) as url:
        bus = await NatsBus.connect(url, "test")
        await bus.serve(SUBJECT, subjects.PIECE, count)
        late = {DEADLINE_HEADER: str(in_s(-1))}
        data = b"whatever"
        await bus._client.publish(SUBJECT, data, reply="nowhere", headers=late)
        with pytest.raises(DeadlineExceeded):
            await bus.call(SUBJECT, subjects.PIECE, piece(), in_s(-1))
        await ask(bus)
        assert handled == [0]
        await bus.close()


async def test_a_deadline_that_cannot_be_read_is_no_fault(tmp_path: Path) -> None:
    async with nats_server(tmp_path) as url:
        bus = await NatsBus.connect(url, "test")

        async def reply(request: PieceRequest, headers: Headers) -> PieceReply:
            return PieceReply(data=headers[DEADLINE_HEADER].encode())

        await bus.serve(SUBJECT, subjects.PIECE, reply)
        inbox: asyncio.Queue[bytes] = asyncio.Queue()

        async def take(message: Any) -> None:
            inbox.put_nowait(message.data)

        await bus._client.subscribe("answers", cb=take)
        await bus._client.publish(
            SUBJECT, codec.encode(piece()), reply="answers", headers={DEADLINE_HEADER: "soon"}
        )
        async with asyncio.timeout(5):
            assert b"soon" in await inbox.get()
        await bus.close()


async def test_a_listener_that_fails_hears_the_next_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()

    def hear(cancel: Cancel) -> None:
        if cancel.request_id == "bad":
            raise ValueError("bug")
        heard.put_nowait(cancel.request_id)

    async with nats_server(tmp_path) as url:
        bus = await NatsBus.connect(url, "test")
        await bus.listen("k3.cancel.x", Cancel, hear)
        await bus._client.publish("k3.cancel.x", b"\xc1 no message")
        for name in ("bad", "good"):
            await bus.publish("k3.cancel.x", Cancel(request_id=name))
        async with asyncio.timeout(5):
            assert await heard.get() == "good"
        await bus.close()
    assert [r.message for r in caplog.records if r.levelno >= logging.WARNING][:2] == [
        "unreadable message dropped", "listener failed",
    ]  # fmt: skip


async def test_a_reply_that_is_too_long_is_an_error_and_the_connection_lives(
    tmp_path: Path,
) -> None:
    sizes = [MAX_MESSAGE_BYTES, 1]

    async def reply(request: PieceRequest, headers: Headers) -> PieceReply:
        return PieceReply(data=bytes(sizes.pop(0)))

    async with nats_server(tmp_path) as url:
        bus = await NatsBus.connect(url, "test")
        await bus.serve(SUBJECT, subjects.PIECE, reply)
        with pytest.raises(InternalError):
            await ask(bus)
        assert (await ask(bus)).data == b"\0"
        await bus.close()


async def test_the_trace_of_the_caller_is_that_of_the_answer(tmp_path: Path) -> None:
    seen: list[str] = []
    tracing = Tracing("gateway", "g", str(tmp_path / "traces"), 1.0)

    async def reply(request: PieceRequest, headers: Headers) -> PieceReply:
        seen.append(headers.get("traceparent", ""))
        return PieceReply(data=b"")

    async with nats_server(tmp_path) as url:
        bus = await NatsBus.connect(url, "test")
        await bus.serve(SUBJECT, subjects.PIECE, reply)
        with tracing.span("request"):
            carrier: dict[str, str] = {}
            propagate.inject(carrier)
            await ask(bus)
        await ask(bus)
        await bus.close()
    tracing.close()
    assert seen == [carrier["traceparent"], ""]


async def test_a_thousand_calls_at_once_get_each_its_own_reply(tmp_path: Path) -> None:
    async def double(request: PieceRequest, headers: Headers) -> PieceReply:
        return PieceReply(data=str(request.offset * 2).encode())

    async with nats_server(tmp_path) as url:
        bus = await NatsBus.connect(url, "test")
        await bus.serve(SUBJECT, subjects.PIECE, double)

        async def one(offset: int) -> bytes:
            request = PieceRequest(digest=b"", offset=offset, size_bytes=0, deadline_unix_ns=0)
            return (await bus.call(SUBJECT, subjects.PIECE, request, in_s(20))).data

        replies = await asyncio.gather(*map(one, range(1000)))
        assert replies == [str(2 * i).encode() for i in range(1000)]
        assert bus._replies.num_waiting == 0
        await bus.close()
