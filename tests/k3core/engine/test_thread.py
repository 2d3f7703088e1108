import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from k3core.engine.thread import EngineThread
from k3wire.errors import InternalError, InvalidRequest, ShuttingDown

WAIT_S = 5.0

Tell = Callable[[tuple[str, ...]], None]


def saying(tell: Tell, wake_at_s: float | None, *words: tuple[str, ...]) -> float | None:
    for word in words:
        tell(word)
    return wake_at_s


class Toy:
    """A core whose steps are what the test says."""

    def __init__(self) -> None:
        self.opened_on = 0
        self.closed = 0
        self.steps = 0
        self.open_error: Exception | None = None
        self.script: list[Callable[[Tell], float | None]] = []

    def open(self) -> None:
        self.opened_on = threading.get_ident()
        if self.open_error is not None:
            raise self.open_error

    def step(self, tell: Tell) -> float | None:
        self.steps += 1
        return self.script.pop(0)(tell) if self.script else None

    def close(self) -> None:
        self.closed += 1


class Heard:
    """The loop's side of the border."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
        self.failures: asyncio.Queue[BaseException] = asyncio.Queue()


def with_engine(test: Callable[[Toy, EngineThread[str], Heard], Awaitable[None]]) -> None:
    async def run() -> None:
        toy, heard = Toy(), Heard()
        engine = EngineThread(toy, heard.events.put_nowait, heard.failures.put_nowait)
        try:
            async with asyncio.timeout(WAIT_S):
                await test(toy, engine, heard)
        finally:
            await engine.close()

    main: Coroutine[Any, Any, None] = run()
    asyncio.run(main)


def test_start_returns_when_the_core_is_open_on_a_thread_of_its_own() -> None:
    async def test(toy: Toy, engine: EngineThread[str], heard: Heard) -> None:
        await engine.start()
        assert toy.opened_on not in (0, threading.get_ident())
        assert engine.is_running
        assert await engine.call(threading.get_ident) == toy.opened_on

    with_engine(test)


def test_a_core_that_cannot_open_fails_the_start_with_our_error() -> None:
    async def test(toy: Toy, engine: EngineThread[str], heard: Heard) -> None:
        toy.open_error = OSError("no such file")
        with pytest.raises(InternalError) as caught:
            await engine.start()
        assert isinstance(caught.value.__cause__, OSError)
        assert not engine.is_running
        await engine.close()
        assert toy.closed == 1

    with_engine(test)


def test_events_of_a_step_reach_the_loop_together_and_in_order() -> None:
    async def test(toy: Toy, engine: EngineThread[str], heard: Heard) -> None:
        toy.script = [
            lambda tell: saying(tell, 0.0, ("a", "b"), ("c",)),
            lambda tell: saying(tell, None, ("d",)),
        ]
        await engine.start()
        assert await heard.events.get() == ("a", "b")
        assert await heard.events.get() == ("c",)
        assert await heard.events.get() == ("d",)

    with_engine(test)


def test_an_idle_engine_sleeps_until_work_arrives() -> None:
    async def test(toy: Toy, engine: EngineThread[str], heard: Heard) -> None:
        await engine.start()
        await engine.call(lambda: None)
        before = await engine.call(lambda: toy.steps)
        assert await engine.call(lambda: toy.steps) == before + 1

    with_engine(test)


def test_a_timed_wake_takes_the_next_step_by_itself() -> None:
    async def test(toy: Toy, engine: EngineThread[str], heard: Heard) -> None:
        toy.script = [
            lambda tell: time.monotonic() + 0.01,
            lambda tell: saying(tell, None, ("woken",)),
        ]
        await engine.start()
        assert await heard.events.get() == ("woken",)

    with_engine(test)


def test_an_error_of_a_call_is_its_callers_and_the_engine_goes_on() -> None:
    async def test(toy: Toy, engine: EngineThread[str], heard: Heard) -> None:
        def refuse() -> None:
            raise InvalidRequest("no")

        await engine.start()
        with pytest.raises(InvalidRequest):
            await engine.call(refuse)
        assert await engine.call(lambda: 7) == 7

    with_engine(test)


def test_a_failing_step_takes_the_engine_down_and_is_heard_once() -> None:
    async def test(toy: Toy, engine: EngineThread[str], heard: Heard) -> None:
        def fail(tell: Tell) -> float | None:
            raise ZeroDivisionError

        toy.script = [fail]
        await engine.start()
        assert isinstance(await heard.failures.get(), ZeroDivisionError)
        assert not engine.is_running
        with pytest.raises(ShuttingDown):
            await engine.call(lambda: None)
        assert not engine.post(lambda: None)
        await engine.close()
        assert toy.closed == 1
        assert heard.failures.empty()

    with_engine(test)


def test_close_answers_calls_that_still_wait_and_is_safe_twice() -> None:
    async def test(toy: Toy, engine: EngineThread[str], heard: Heard) -> None:
        gate = threading.Event()

        def hold(tell: Tell) -> float | None:
            gate.wait(WAIT_S)
            return None

        toy.script = [hold]
        await engine.start()
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(engine.call(lambda: "ran"))
            await asyncio.sleep(0)
            group.create_task(engine.close())
            await asyncio.sleep(0)
            gate.set()
        assert waiting.result() == "ran"
        await engine.close()
        assert toy.closed == 1
        with pytest.raises(ShuttingDown):
            await engine.call(lambda: None)

    with_engine(test)


def test_close_before_start_is_fine() -> None:
    async def test(toy: Toy, engine: EngineThread[str], heard: Heard) -> None:
        await engine.close()
        assert toy.closed == 0

    with_engine(test)
