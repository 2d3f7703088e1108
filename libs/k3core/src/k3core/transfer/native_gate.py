"""The gate before a native handle: every call passes it, none after the close.

A native call cannot be cancelled and goes on reading or writing the caller's memory. So a call
that has begun is waited for to its end, whatever happens to the caller; one that still waits for
its turn just leaves the queue. Calls with the same lane run one after the other: one peer that does
not answer holds one thread, not all of them.
"""

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from k3wire.errors import TierUnavailable

T = TypeVar("T")

NATIVE_THREADS = 2
"""Native calls at once: they wait in busy loops, and more were measured to be slower on two cores."""


class NativeGate:
    """Runs native calls in threads while open, and waits for them before it closes."""

    def __init__(self, name: str, num_threads: int = NATIVE_THREADS) -> None:
        """Opens.

        Args:
            name: of the threads.
            num_threads: native calls at once.
        """
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._slots = asyncio.Semaphore(num_threads)
        self._lanes: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        # Any: each call has a result of its own type.
        self._running: set[asyncio.Future[Any]] = set()
        self._is_open = True
        self._pid = os.getpid()

    async def run(self, call: Callable[[], T], lane: str = "") -> T:
        """Runs a call; ends only when the native call has, also when cancelled.

        Args:
            call: runs in a thread.
            lane: calls with the same one run one after the other; "" has no order.

        Raises:
            TierUnavailable: the gate is closed, or this process was forked from the one that
                opened it.
        """
        async with self._turn(lane):
            if not self._is_open:
                raise TierUnavailable("The data plane is closed")
            if os.getpid() != self._pid:
                raise TierUnavailable("The data plane does not survive a fork; spawn instead")
            return await self._run_to_the_end(call)

    @contextlib.asynccontextmanager
    async def _turn(self, lane: str) -> AsyncGenerator[None, None]:
        if not lane:
            async with self._slots:
                yield
            return
        lock = self._lanes.get(lane)
        if lock is None:
            # Held by whoever waits or runs; the table forgets it with the last of them.
            lock = self._lanes[lane] = asyncio.Lock()
        async with lock, self._slots:
            yield

    async def _run_to_the_end(self, call: Callable[[], T]) -> T:
        future = asyncio.get_running_loop().run_in_executor(self._executor, call)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                # The native call still reads or writes the caller's memory.
                cancelled = error
        if cancelled is not None:
            future.exception()
            raise cancelled
        return future.result()

    async def close(self, last: Callable[[], object]) -> None:
        """Refuses later calls, waits for running ones, then runs a last one; safe twice."""
        if not self._is_open:
            return
        self._is_open = False
        if self._running:
            await asyncio.wait(set(self._running))
        await self._run_to_the_end(last)
        self._executor.shutdown(wait=False)
