"""What both buses promise, over a real NATS server and in memory."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.nats_server import nats_server

from k3wire import subjects
from k3wire.bus.base import Bus, Headers
from k3wire.bus.memory import MemoryBus
from k3wire.bus.nats_bus import NatsBus
from k3wire.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidImageUrl,
    NoResponders,
    ShuttingDown,
    SlowDown,
)
from k3wire.messages.base import PieceReply, PieceRequest
from k3wire.messages.control import Cancel

SUBJECT = "k3.test.piece"


@pytest.fixture(params=["memory", "nats"])
async def bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    if request.param == "memory":
        yield MemoryBus()
        return
    async with nats_server(tmp_path) as url:
        connection = await NatsBus.connect(url, "test")
        yield connection
        await connection.close()


def in_s(seconds: float) -> int:
    return time.time_ns() + int(seconds * 1e9)


def piece(offset: int = 0) -> PieceRequest:
    return PieceRequest(digest=b"d", offset=offset, size_bytes=1, deadline_unix_ns=0)


async def call(bus: Bus, offset: int = 0, seconds: float = 5) -> PieceReply:
    return await bus.call(SUBJECT, subjects.PIECE, piece(offset), in_s(seconds))


async def echo(request: PieceRequest, headers: Headers) -> PieceReply:
    return PieceReply(data=bytes([request.offset]))


async def test_a_call_gets_its_reply(bus: Bus) -> None:
    await bus.serve(SUBJECT, subjects.PIECE, echo)
    assert (await call(bus, 7)).data == b"\x07"


async def test_a_call_that_nobody_serves_fails_at_once(bus: Bus) -> None:
    with pytest.raises(NoResponders):
        await call(bus)


async def test_an_error_of_the_other_side_arrives_as_itself(bus: Bus) -> None:
    async def refuse(request: PieceRequest, headers: Headers) -> PieceReply:
        raise InvalidImageUrl("bad address", param="messages[0]")

    await bus.serve(SUBJECT, subjects.PIECE, refuse)
    with pytest.raises(InvalidImageUrl) as caught:
        await call(bus)
    assert (caught.value.message, caught.value.param) == ("bad address", "messages[0]")


async def test_a_bug_of_the_other_side_tells_nothing_of_itself(bus: Bus) -> None:
    async def fail(request: PieceRequest, headers: Headers) -> PieceReply:
        raise ValueError("secret path /etc")

    await bus.serve(SUBJECT, subjects.PIECE, fail)
    with pytest.raises(InternalError) as caught:
        await call(bus)
    assert "secret" not in caught.value.message


async def test_handlers_run_beside_each_other(bus: Bus) -> None:
    both = asyncio.Barrier(2)

    async def meet(request: PieceRequest, headers: Headers) -> PieceReply:
        await both.wait()
        return PieceReply(data=b"met")

    await bus.serve(SUBJECT, subjects.PIECE, meet)
    replies = await asyncio.gather(call(bus), call(bus))
    assert [reply.data for reply in replies] == [b"met", b"met"]


async def test_a_handler_that_outlives_its_deadline_is_cancelled(bus: Bus) -> None:
    cancelled = asyncio.Event()

    async def hang(request: PieceRequest, headers: Headers) -> PieceReply:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    await bus.serve(SUBJECT, subjects.PIECE, hang)
    with pytest.raises(DeadlineExceeded):
        await call(bus, seconds=0.05)
    async with asyncio.timeout(5):
        await cancelled.wait()


async def test_more_calls_than_may_wait_are_told_to_slow_down(bus: Bus) -> None:
    release = asyncio.Event()

    async def hang(request: PieceRequest, headers: Headers) -> PieceReply:
        await release.wait()
        return PieceReply(data=b"")

    await bus.serve(SUBJECT, subjects.PIECE, hang, max_concurrency=1)
    tasks = [asyncio.ensure_future(call(bus)) for _ in range(12)]  # noqa: TID251
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=5)
    assert isinstance(next(iter(done)).exception(), SlowDown)
    release.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(result, PieceReply) for result in results) == 9


async def test_drain_finishes_what_runs_and_takes_no_more(bus: Bus) -> None:
    started, release = asyncio.Event(), asyncio.Event()

    async def slow(request: PieceRequest, headers: Headers) -> PieceReply:
        started.set()
        await release.wait()
        return PieceReply(data=b"done")

    subscription = await bus.serve(SUBJECT, subjects.PIECE, slow)
    running = asyncio.ensure_future(call(bus))  # noqa: TID251
    async with asyncio.timeout(5):
        await started.wait()
    draining = asyncio.ensure_future(subscription.drain())  # noqa: TID251
    await asyncio.sleep(0.05)
    with pytest.raises((NoResponders, ShuttingDown)):
        await call(bus, seconds=1)
    assert not draining.done()
    release.set()
    async with asyncio.timeout(5):
        assert (await running).data == b"done"
        await draining
    await subscription.drain()


async def test_events_reach_every_listener_of_a_wildcard(bus: Bus) -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()
    for name in "ab":
        await bus.listen(
            "k3.cancel.>", Cancel, lambda m, n=name: heard.put_nowait(n + m.request_id)
        )
    await bus.publish("k3.cancel.encoder", Cancel(request_id="r"))
    async with asyncio.timeout(5):
        assert sorted([await heard.get(), await heard.get()]) == ["ar", "br"]


async def test_a_message_over_the_limit_is_refused_before_it_is_sent(bus: Bus) -> None:
    with pytest.raises(InternalError):
        await bus.publish("k3.cancel.encoder", Cancel(request_id="r" * 70_000))


async def test_a_queue_group_shares_calls(tmp_path: Path) -> None:
    async with nats_server(tmp_path) as url:
        buses = [await NatsBus.connect(url, f"b{i}") for i in range(3)]
        counts = [0, 0]

        def server(index: int) -> Any:
            async def count(request: PieceRequest, headers: Headers) -> PieceReply:
                counts[index] += 1
                return PieceReply(data=b"")

            return count

        for index in range(2):
            await buses[index].serve(SUBJECT, subjects.PIECE, server(index), queue="q")
        for _ in range(40):
            await call(buses[2])
        assert sum(counts) == 40
        assert all(counts)
        for one in buses:
            await one.close()


async def test_a_bus_outlives_its_server(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with nats_server(tmp_path / "a") as url:
        bus = await NatsBus.connect(url, "test")
        await bus.serve(SUBJECT, subjects.PIECE, echo)
        assert (await call(bus, 1)).data == b"\x01"
    async with nats_server(tmp_path / "b", port=int(url.rsplit(":", 1)[1])):
        async with asyncio.timeout(5):
            while True:
                try:
                    assert (await call(bus, 2, seconds=1)).data == b"\x02"
                    break
                except (NoResponders, DeadlineExceeded):
                    await asyncio.sleep(0.05)
        await bus.close()
        await bus.close()
