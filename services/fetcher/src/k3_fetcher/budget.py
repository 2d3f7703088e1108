"""Bytes of bodies that are being read at once, in all downloads of this process together."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator


class ByteBudget:
    """A number of bytes that downloads take before they read and give back after.

    Attributes:
        free_bytes: not taken now.
    """

    def __init__(self, size_bytes: int) -> None:
        """Starts with all bytes free."""
        self.free_bytes = size_bytes
        self._size_bytes = size_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def take(self, size_bytes: int) -> AsyncGenerator[None]:
        """Takes bytes for a block, waiting for its turn in order of arrival.

        All of them at once, so that no two downloads can each hold what the other needs. What is
        larger than the whole budget waits for all of it.
        """
        size_bytes = min(size_bytes, self._size_bytes)
        await self._acquire(size_bytes)
        try:
            yield
        finally:
            self.free_bytes += size_bytes
            self._serve()

    async def _acquire(self, size_bytes: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, turn))
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            # Cancelled after the bytes were given, but before it could learn of them.
            if turn.done() and not turn.cancelled():
                self.free_bytes += size_bytes
            self._serve()
            raise

    def _serve(self) -> None:
        while self._waiting:
            size_bytes, turn = self._waiting[0]
            if not turn.done():
                if size_bytes > self.free_bytes:
                    return
                self.free_bytes -= size_bytes
                turn.set_result(None)
            self._waiting.popleft()
