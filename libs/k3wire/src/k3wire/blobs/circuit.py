"""A circuit breaker: after a failure a tier is left alone until one probe of ours succeeds.

While the circuit is open every caller fails within microseconds. No caller is ever the probe, so a
tier that hangs costs its time-out once and not once a second.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable


class Circuit:
    """Whether a tier may be asked now."""

    def __init__(
        self, probe: Callable[[], Awaitable[bool]], first_wait_s: float, last_wait_s: float
    ) -> None:
        """Starts closed: the tier may be asked.

        Args:
            probe: asks the tier something small; bounded; says whether it answered.
            first_wait_s: between a failure and the first probe.
            last_wait_s: the longest time between two probes; waits double up to it.
        """
        self._probe = probe
        self._first_wait_s = first_wait_s
        self._last_wait_s = last_wait_s
        self._wait_s = first_wait_s
        self._is_open = False
        self._next_probe_s = 0.0
        self._probing: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the tier is being left alone."""
        return self._is_open

    def may_pass(self) -> bool:
        """Says whether to ask the tier; while it may not, a due probe is begun beside."""
        if not self._is_open:
            return True
        if time.monotonic() >= self._next_probe_s and self._probing is None:
            self._probing = asyncio.get_running_loop().create_task(self._look())
        return False

    def trip(self) -> bool:
        """Notes a failure; says whether the circuit was closed before it."""
        was_closed = not self._is_open
        if was_closed:
            self._is_open = True
            self._wait_s = self._first_wait_s
            self._next_probe_s = time.monotonic() + self._wait_s
        return was_closed

    async def _look(self) -> None:
        try:
            if await self._probe():
                self._is_open = False
                return
            self._wait_s = min(2 * self._wait_s, self._last_wait_s)
            self._next_probe_s = time.monotonic() + self._wait_s
        finally:
            self._probing = None

    async def close(self) -> None:
        """Ends a probe that is under way; safe twice."""
        probing = self._probing
        if probing is not None:
            probing.cancel()
            await asyncio.wait([probing])
