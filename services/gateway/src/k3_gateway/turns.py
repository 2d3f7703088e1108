"""Work on the processor beside the event loop, the heavier the fewer at once.

A thread that computes shares the interpreter with the loop: each one more makes every other
request wait longer for its turn, and holds copies of a large body meanwhile.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

SHORT_BYTES = 16 * 1024
"""Up to this, work is done on the loop: a millisecond or two."""

HEAVY_BYTES = 1024 * 1024
"""From this on, work waits for its turn."""

MAX_HEAVY_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class Turns:
    """Where work is done; one for all requests of a process.

    Attributes:
        heavy: turns that are left.
    """

    heavy: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_HEAVY_AT_ONCE))

    async def run(self, size_bytes: int, work: Callable[[], T]) -> T:
        """Runs work and gives its result.

        A caller that is cancelled does not wait for work that has begun; its turn lasts as long as
        the work does.

        Args:
            size_bytes: of what is worked on.
            work: must not hold the interpreter for long at a time.
        """
        if size_bytes <= SHORT_BYTES:
            return work()
        if size_bytes < HEAVY_BYTES:
            return await asyncio.to_thread(work)
        await self.heavy.acquire()
        done = asyncio.get_running_loop().run_in_executor(None, work)
        done.add_done_callback(self._end_turn)
        return await asyncio.shield(done)

    def _end_turn(self, done: "asyncio.Future[T]") -> None:
        self.heavy.release()
        if not done.cancelled():
            # Somebody who left does not ask for it, and the loop would complain.
            done.exception()
