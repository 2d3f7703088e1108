"""Room in a registered memory that callers wait for, so that a burst queues instead of failing."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from k3core.engine.host_memory import HostMemory, Span, SpanAllocator
from k3wire.errors import ImageTooLarge

T = TypeVar("T")

REST_S = 0.5
"""Rest of abandoned room. A preprocessor whose call ended ends its write well within."""


class Room:
    """Spans of one memory.

    Attributes:
        memory: whose spans these are.
    """

    def __init__(self, size_bytes: int) -> None:
        """Maps the memory; its pages are taken as they are touched."""
        self.memory = HostMemory(size_bytes)
        self._allocator = SpanAllocator(size_bytes)
        self._freed = asyncio.Event()
        # Taken in turn, so that small images do not keep a large one waiting for ever.
        self._turn = asyncio.Lock()
        self._resting: dict[Span, asyncio.TimerHandle] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes out now, resting ones included."""
        return self._allocator.used_bytes

    def try_allocate(self, size_bytes: int) -> Span | None:
        """Takes a span at once, or None."""
        return self._allocator.allocate(size_bytes)

    def free(self, span: Span) -> None:
        """Gives a span back."""
        self._allocator.free(span)
        self._freed.set()

    @contextlib.asynccontextmanager
    async def span(self, size_bytes: int, param: str) -> AsyncGenerator[Span, None]:
        """Holds a span for a block, waiting until there is one; the caller bounds the wait.

        A block that fails may have left a peer writing: its span rests before others get it.

        Args:
            size_bytes: of the span.
            param: of the image it is for, for the error.

        Raises:
            ImageTooLarge: it would never fit.
        """
        if size_bytes > self._allocator.size_bytes:
            raise ImageTooLarge("The image is larger than this server can encode", param=param)
        async with self._turn:
            while (found := self._allocator.allocate(size_bytes)) is None:
                self._freed.clear()
                await self._freed.wait()
        try:
            yield found
        except BaseException:
            loop = asyncio.get_running_loop()
            self._resting[found] = loop.call_later(REST_S, self._end_rest, found)
            raise
        self.free(found)

    def close(self) -> None:
        """Stops the timers of resting spans; safe twice."""
        for timer in self._resting.values():
            timer.cancel()
        self._resting.clear()

    def _end_rest(self, span: Span) -> None:
        del self._resting[span]
        self.free(span)


async def run_to_end(work: Callable[[], T]) -> T:
    """Runs work on memory in a thread, and waits for its end even when cancelled.

    A thread cannot be stopped; memory given back under it would change hands too early.
    """
    future = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise
