"""The chassis: start, beat, serve, hear cancels, drain; and its probes over HTTP."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from k3wire import subjects
from k3wire.bus.memory import MemoryBus
from k3wire.errors import DeadlineExceeded, InvalidImageUrl, NoResponders
from k3wire.messages.base import PieceReply, PieceRequest
from k3wire.messages.control import HEARTBEAT_INTERVAL_S, Cancel, Heartbeat, WorkerLoad
from k3wire.service.runtime import ServiceRuntime, resident_bytes
from k3wire.service.settings import CommonSettings
from k3wire.telemetry import metrics


@pytest.fixture(autouse=True)
def quiet_root_logger() -> Any:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])


class Watched:
    """A runtime on a memory bus, and its beats."""

    def __init__(self, **settings: Any) -> None:
        self.bus = MemoryBus()
        self.beats: list[Heartbeat] = []
        self.settings = CommonSettings(**settings)
        self.runtime = ServiceRuntime(
            "encoder", self.settings, self.bus, load=lambda: WorkerLoad(num_running=3)
        )

    async def until(self, is_so: Callable[[], object]) -> None:
        async with asyncio.timeout(5):
            while not is_so():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def ask(self, seconds: float = 5) -> PieceReply:
        request = PieceRequest(digest=b"", offset=0, size_bytes=0, deadline_unix_ns=0)
        until_ns = time.time_ns() + int(seconds * 1e9)
        return await self.bus.call(
            subjects.shared(subjects.PIECE), subjects.PIECE, request, until_ns
        )


@pytest.fixture
async def watched() -> Watched:
    found = Watched(grace_s=1.0)
    await found.bus.listen(subjects.heartbeats(), Heartbeat, found.beats.append)
    return found


async def answer(request: PieceRequest) -> PieceReply:
    return PieceReply(data=b"x")


async def test_it_beats_serves_drains_and_says_goodbye(watched: Watched) -> None:
    async with watched.runtime as runtime:
        running = asyncio.get_running_loop().create_task(runtime.run())
        await watched.until(lambda: watched.beats)
        assert (watched.beats[0].is_ready, watched.beats[0].reason) == (False, "starting")
        await runtime.serve_shared(subjects.PIECE, answer)
        runtime.ready()
        await watched.until(lambda: watched.beats[-1].is_ready)
        assert (await watched.ask()).data == b"x"
        runtime.not_ready("no master")
        await watched.until(lambda: not watched.beats[-1].is_ready)
        assert watched.beats[-1].reason == "no master"
        runtime.ready()
        runtime.stop()
        runtime.stop()
        await running
        with pytest.raises(NoResponders):
            await watched.ask()
    assert [beat.seq for beat in watched.beats] == list(range(1, len(watched.beats) + 1))
    assert {beat.load.num_running for beat in watched.beats} == {3}
    assert {beat.worker_id for beat in watched.beats} == {watched.runtime.worker_id}
    assert watched.beats[-1].is_draining
    assert not watched.beats[-1].is_ready


async def test_a_drain_waits_for_what_runs_in_order(watched: Watched) -> None:
    order: list[str] = []
    started, release = asyncio.Event(), asyncio.Event()

    async def slow(request: PieceRequest) -> PieceReply:
        started.set()
        await release.wait()
        order.append("call")
        return PieceReply(data=b"done")

    async def note(name: str) -> None:
        order.append(name)

    async with watched.runtime as runtime:
        running = asyncio.get_running_loop().create_task(runtime.run())
        await runtime.serve_direct(subjects.PIECE, slow)
        runtime.on_stop(lambda: note("stop"))
        runtime.on_drain(lambda: note("drain"))
        request = PieceRequest(digest=b"", offset=0, size_bytes=0, deadline_unix_ns=0)
        call = asyncio.get_running_loop().create_task(
            watched.bus.call(
                subjects.direct(subjects.PIECE, runtime.worker_id), subjects.PIECE, request,
                time.time_ns() + 5 * 10**9,
            )
        )  # fmt: skip
        await watched.until(started.is_set)
        runtime.stop()
        await watched.until(lambda: order == ["stop"])
        assert not running.done()
        release.set()
        assert (await call).data == b"done"
        await running
    assert order == ["stop", "call", "drain"]


async def test_a_worker_that_drains_beats_until_it_is_gone(watched: Watched) -> None:
    watched = Watched(grace_s=10.0)
    await watched.bus.listen(subjects.heartbeats(), Heartbeat, watched.beats.append)
    started, release = asyncio.Event(), asyncio.Event()

    async def slow(request: PieceRequest) -> PieceReply:
        started.set()
        await release.wait()
        return PieceReply(data=b"done")

    async with watched.runtime as runtime:
        running = asyncio.get_running_loop().create_task(runtime.run())
        await runtime.serve_shared(subjects.PIECE, slow)
        runtime.ready()
        call = asyncio.get_running_loop().create_task(watched.ask())
        await watched.until(started.is_set)
        runtime.stop()
        # More than the two that announce it.
        await watched.until(lambda: sum(beat.is_draining for beat in watched.beats) >= 5)
        assert watched.beats[-1].is_ready
        release.set()
        assert (await call).data == b"done"
        await running
    assert not watched.beats[-1].is_ready
    assert [beat.seq for beat in watched.beats] == list(range(1, len(watched.beats) + 1))


async def test_the_grace_period_ends_a_drain(watched: Watched) -> None:
    async def forever(request: PieceRequest) -> PieceReply:
        await asyncio.Event().wait()
        raise AssertionError

    watched = Watched(grace_s=0.05)
    async with watched.runtime as runtime:
        await runtime.serve_shared(subjects.PIECE, forever)
        call = asyncio.get_running_loop().create_task(watched.ask(1))
        await asyncio.sleep(0)
        runtime.stop()
        async with asyncio.timeout(5):
            await runtime.run()
        with pytest.raises(DeadlineExceeded):
            await call


async def test_sigterm_is_a_drain(watched: Watched) -> None:
    async with watched.runtime as runtime:
        running = asyncio.get_running_loop().create_task(runtime.run())
        await watched.until(lambda: watched.beats)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(5):
            await running
        assert runtime.is_draining


async def test_cancels_of_the_role_are_heard(watched: Watched) -> None:
    heard: list[str] = []
    async with watched.runtime as runtime:
        await runtime.listen_cancel(lambda cancel: heard.append(cancel.request_id))
        await watched.bus.publish(subjects.cancel("encoder"), Cancel(request_id="mine"))
        await watched.bus.publish(subjects.cancel("decode"), Cancel(request_id="another's"))
    assert heard == ["mine"]


async def test_faults_of_ours_are_counted_and_errors_of_the_tree_are_not(watched: Watched) -> None:
    def counted() -> float:
        return metrics.REGISTRY.get_sample_value("k3_handler_faults_total") or 0

    faults: list[Exception] = [InvalidImageUrl("no"), ValueError("bug")]

    async def fail(request: PieceRequest) -> PieceReply:
        raise faults.pop(0)

    before = counted()
    async with watched.runtime as runtime:
        await runtime.serve_shared(subjects.PIECE, fail)
        for expected in (0, 1):
            with pytest.raises(Exception, match=r"no|wrong"):
                await watched.ask()
            assert counted() - before == expected


async def test_beats_keep_their_pace_while_handlers_are_busy(watched: Watched) -> None:
    async with watched.runtime as runtime:
        await runtime.serve_shared(subjects.PIECE, answer)
        running = asyncio.get_running_loop().create_task(runtime.run())
        until_s = time.monotonic() + 20 * HEARTBEAT_INTERVAL_S
        while time.monotonic() < until_s:
            await asyncio.gather(*(watched.ask() for _ in range(20)))
        runtime.stop()
        await running
    # Twenty are due; a crowded machine may lose some, a busy loop must not lose most.
    assert len(watched.beats) >= 10


async def get(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    async with asyncio.timeout(5):
        data = await reader.read()
    writer.close()
    return data


async def test_probes_answer_apart_from_the_service(watched: Watched) -> None:
    async with watched.runtime as runtime:
        port = runtime.health_port
        assert (await get(port, b"GET /health HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200")
        starting = await get(port, b"GET /ready?x HTTP/1.1\r\n\r\n")
        assert starting.startswith(b"HTTP/1.1 503")
        assert b"starting" in starting
        runtime.ready()
        assert (await get(port, b"HEAD /ready HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200")
        shown = await get(port, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert b"gen_ai_server_time_to_first_token_seconds_bucket" in shown
        assert (await get(port, b"GET /else HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 404")
        assert (await get(port, b"POST /ready HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 405")
        assert await get(port, b"G" * 40_000 + b"\r\n\r\n") == b""
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


def test_resident_memory_is_known() -> None:
    assert 1_000_000 < resident_bytes() < 10**11
