"""Room in a registered memory that callers wait for, so that a burst queues instead of failing."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from k3core.engine.host_memory import HostMemory, Span, SpanAllocator
from k3wire.errors import ImageTooLarge


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

    @property
    def used_bytes(self) -> int:
        """Bytes out now."""
        return self._allocator.used_bytes

    def try_allocate(self, size_bytes: int) -> Span | None:
        """Takes a span at once, or None."""
        return self._allocator.allocate(size_bytes)

    def free(self, span: Span) -> None:
        """Gives a span back without telling waiters; for memory that nobody waits for."""
        self._allocator.free(span)

    @contextlib.asynccontextmanager
    async def span(self, size_bytes: int, param: str) -> AsyncGenerator[Span, None]:
        """Holds a span for a block, waiting until there is one; the caller bounds the wait.

        Args:
            size_bytes: of the span.
            param: of the image it is for, for the error.

        Raises:
            ImageTooLarge: it would never fit.
        """
        if size_bytes > self._allocator.size_bytes:
            raise ImageTooLarge("The image is larger than this server can encode", param=param)
        while (found := self._allocator.allocate(size_bytes)) is None:
            self._freed.clear()
            await self._freed.wait()
        try:
            yield found
        finally:
            self._allocator.free(found)
            self._freed.set()
