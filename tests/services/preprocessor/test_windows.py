import asyncio
import threading

import pytest

from k3_preprocessor.windows import Windows, run_to_end


async def test_windows_tile_the_registered_region_without_overlap() -> None:
    windows = Windows(1000, 3)
    async with windows.take() as one, windows.take() as two, windows.take() as three:
        assert windows.num_free == 0
        starts = sorted(window.address for window in (one, two, three))
        assert starts == [windows.region.address + 1000 * index for index in range(3)]
        assert all(window.view.size == 1000 for window in (one, two, three))
        assert all(window.view.ctypes.data == window.address for window in (one, two, three))
    assert windows.num_free == 3


async def test_whoever_finds_no_window_waits_for_one() -> None:
    windows = Windows(1000, 1)
    order: list[str] = []

    async def second() -> None:
        async with windows.take():
            order.append("second")

    async with asyncio.timeout(5), asyncio.TaskGroup() as group, windows.take():
        group.create_task(second())
        await asyncio.sleep(0)
        order.append("first")
    assert order == ["first", "second"]


async def test_a_window_is_not_given_back_while_a_cancelled_filling_still_runs() -> None:
    windows = Windows(1000, 1)
    has_begun, may_end = threading.Event(), threading.Event()

    def fill() -> None:
        has_begun.set()
        assert may_end.wait(5)

    async def use() -> None:
        async with windows.take():
            await run_to_end(fill)

    async with asyncio.timeout(5):
        task = asyncio.ensure_future(use())  # noqa: TID251
        await asyncio.to_thread(has_begun.wait, 5)
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
        assert windows.num_free == 0
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert windows.num_free == 1
