import asyncio
from collections.abc import Awaitable, Callable

import pytest

from k3wire.blobs.single_flight import SingleFlight
from k3wire.errors import BlobLost, K3Error

WAIT_S = 5.0


class Work:
    """A computation that waits until it is let go, and counts."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.gate = asyncio.Event()
        self.slow_end = asyncio.Event()
        self.slow_end.set()
        self.num_started = 0
        self.num_cancelled = 0
        self.error: K3Error | None = None

    async def __call__(self) -> int:
        self.num_started += 1
        number = self.num_started
        self.started.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            await self.slow_end.wait()
            raise
        if self.error is not None:
            raise self.error
        return number


def run(test: Callable[[SingleFlight[str, int], Work], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await test(SingleFlight(), Work())

    asyncio.run(bounded())


async def cancel(task: "asyncio.Task[int]") -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_callers_of_one_key_share_one_computation() -> None:
    async def test(flights: SingleFlight[str, int], work: Work) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(flights.run("a", work)) for _ in range(5)]
            await work.started.wait()
            assert flights.is_flying("a")
            work.gate.set()
        assert [task.result() for task in tasks] == [1] * 5
        assert (work.num_started, flights.num_flights) == (1, 0)

    run(test)


def test_a_caller_that_leaves_does_not_end_the_work_of_others() -> None:
    async def test(flights: SingleFlight[str, int], work: Work) -> None:
        async with asyncio.TaskGroup() as group:
            leaving = group.create_task(flights.run("a", work))
            await work.started.wait()
            staying = group.create_task(flights.run("a", work))
            await asyncio.sleep(0)
            await cancel(leaving)
            work.gate.set()
        assert staying.result() == 1
        assert work.num_cancelled == 0

    run(test)


def test_the_last_caller_that_leaves_cancels_the_work() -> None:
    async def test(flights: SingleFlight[str, int], work: Work) -> None:
        async with asyncio.TaskGroup() as group:
            only = group.create_task(flights.run("a", work))
            await work.started.wait()
            await cancel(only)
        await asyncio.sleep(0)
        assert (work.num_cancelled, flights.num_flights) == (1, 0)

    run(test)


def test_a_caller_does_not_join_work_that_was_given_up() -> None:
    async def test(flights: SingleFlight[str, int], work: Work) -> None:
        work.slow_end.clear()
        async with asyncio.TaskGroup() as group:
            first = group.create_task(flights.run("a", work))
            await work.started.wait()
            await cancel(first)
            # The given-up work is still ending: this caller must not be ended with it.
            second = group.create_task(flights.run("a", work))
            await asyncio.sleep(0)
            assert flights.is_flying("a")
            work.slow_end.set()
            work.gate.set()
        assert second.result() == 2

    run(test)


def test_a_failure_reaches_every_caller_as_an_error_of_its_own() -> None:
    async def test(flights: SingleFlight[str, int], work: Work) -> None:
        work.error = BlobLost("gone", param="p", retry_after_s=2.0)
        work.gate.set()
        results = await asyncio.gather(
            *(flights.run("a", work) for _ in range(3)), return_exceptions=True
        )
        assert len({id(error) for error in results}) == 3
        for error in results:
            assert isinstance(error, BlobLost)
            assert (error.message, error.param, error.retry_after_s) == ("gone", "p", 2.0)
        work.error = None
        assert await flights.run("a", work) == 2

    run(test)
