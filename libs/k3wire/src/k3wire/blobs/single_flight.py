"""One computation a key: later callers wait for the first one's result.

A caller that is cancelled leaves alone; the computation is cancelled when the last one has left.
Its failure reaches every caller that waits then, each with an error of its own.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from k3wire.errors import K3Error

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True)
class _Flight(Generic[V]):
    task: "asyncio.Task[V]"
    num_waiting: int = 0


class SingleFlight(Generic[K, V]):
    """The computations under way, by key."""

    def __init__(self) -> None:
        self._flights: dict[K, _Flight[V]] = {}

    @property
    def num_flights(self) -> int:
        """Computations under way."""
        return len(self._flights)

    @property
    def num_waiting(self) -> int:
        """Callers that wait for one of them."""
        return sum(flight.num_waiting for flight in self._flights.values())

    def is_flying(self, key: K) -> bool:
        """Whether a call for the key would join one under way."""
        return key in self._flights

    async def run(self, key: K, compute: Callable[[], Awaitable[V]]) -> V:
        """Gives the key's result, computing it unless somebody already does.

        Raises:
            K3Error: what the computation raised, a fresh copy for each caller.
        """
        flight = self._flights.get(key)
        if flight is None:

            async def fly() -> V:
                return await compute()

            task = asyncio.get_running_loop().create_task(fly())
            flight = _Flight(task)
            self._flights[key] = flight
            task.add_done_callback(lambda _: self._land(key, task))
        flight.num_waiting += 1
        try:
            return await asyncio.shield(flight.task)
        except K3Error as error:
            copy = type(error)(error.message, param=error.param, retry_after_s=error.retry_after_s)
            raise copy from error
        finally:
            flight.num_waiting -= 1
            if flight.num_waiting == 0 and not flight.task.done():
                flight.task.cancel()
                # Whoever comes while it still winds down must not board it.
                if self._flights.get(key) is flight:
                    del self._flights[key]

    def _land(self, key: K, task: "asyncio.Task[V]") -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]
        if not task.cancelled():
            # Whoever waited has it; a failure that nobody waits for any more is no news.
            task.exception()
