"""The gate before a native handle, with calls that the test holds."""

import asyncio
import os
import threading
from collections.abc import Callable

import pytest

from k3core.transfer.native_gate import NativeGate
from k3wire.errors import TierUnavailable


class HeldCall:
    """A native call that ends when the test says so."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self._may_end = threading.Event()

    def __call__(self) -> str:
        self.has_begun.set()
        assert self._may_end.wait(10)
        return "done"

    def end(self) -> None:
        self._may_end.set()


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 5)


async def run_soon(gate: NativeGate, call: Callable[[], str], lane: str = "") -> asyncio.Task[str]:
    task = asyncio.get_running_loop().create_task(gate.run(call, lane))
    await asyncio.sleep(0)
    return task


async def test_a_cancelled_call_ends_only_with_the_native_one() -> None:
    gate, held = NativeGate("test"), HeldCall()
    task = await run_soon(gate, held)
    await until(held.has_begun)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
    held.end()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(5):
            await task
    await gate.close(lambda: None)


async def test_a_call_that_waits_for_its_turn_can_leave_at_once() -> None:
    gate, held = NativeGate("test", num_threads=1), HeldCall()
    first = await run_soon(gate, held)
    await until(held.has_begun)
    begun: list[str] = []
    second = await run_soon(gate, lambda: str(begun.append("second")))
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(5):
            await second
    assert not first.done()
    held.end()
    assert await first == "done"
    assert begun == []
    await gate.close(lambda: None)


async def test_a_peer_that_hangs_holds_one_thread_of_two() -> None:
    gate, held = NativeGate("test", num_threads=2), HeldCall()
    hanging = [await run_soon(gate, held, lane="frozen") for _ in range(3)]
    await until(held.has_begun)
    async with asyncio.timeout(5):
        assert await gate.run(lambda: "healthy", lane="other") == "healthy"
    assert not any(task.done() for task in hanging)
    held.end()
    assert await asyncio.gather(*hanging) == ["done"] * 3
    await gate.close(lambda: None)


async def test_calls_of_one_lane_run_one_after_the_other() -> None:
    gate = NativeGate("test", num_threads=4)
    inside: list[int] = []
    deepest: list[int] = []

    def call() -> str:
        inside.append(1)
        deepest.append(len(inside))
        inside.pop()
        return ""

    await asyncio.gather(*(gate.run(call, lane="one") for _ in range(200)))
    assert deepest == [1] * 200
    await gate.close(lambda: None)


async def test_close_waits_for_what_runs_and_refuses_what_comes_after() -> None:
    gate, held = NativeGate("test"), HeldCall()
    task = await run_soon(gate, held)
    await until(held.has_begun)
    closed: list[bool] = []
    closing = asyncio.get_running_loop().create_task(gate.close(lambda: closed.append(task.done())))
    await asyncio.sleep(0)
    with pytest.raises(TierUnavailable):
        await gate.run(lambda: "late")
    assert not closing.done()
    held.end()
    async with asyncio.timeout(5):
        await closing
    assert await task == "done"
    assert len(closed) == 1
    await gate.close(lambda: closed.append(True))
    assert len(closed) == 1


async def test_a_forked_child_is_refused_instead_of_hanging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = NativeGate("test")
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    with pytest.raises(TierUnavailable):
        await gate.run(lambda: "hangs")
    monkeypatch.undo()
    assert await gate.run(lambda: "works") == "works"
    await gate.close(lambda: None)


async def test_a_failing_call_fails_its_caller_and_frees_its_thread() -> None:
    gate = NativeGate("test", num_threads=1)

    def fail() -> str:
        raise RuntimeError("native")

    for _ in range(3):
        with pytest.raises(RuntimeError):
            await gate.run(fail)
    assert await gate.run(lambda: "on") == "on"
    await gate.close(lambda: None)
