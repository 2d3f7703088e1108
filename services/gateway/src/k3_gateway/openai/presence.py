"""Whether the client is still there, watched from a request's body to its last byte.

The server says that a client left only to whoever receives. One task a request does, and ends
what serves the request when it hears it: the way a time-out ends a block, by a cancel that leaves
the block as an error of ours.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any

from k3wire.errors import Cancelled

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
"""As in ASGI, where messages are dictionaries of anything."""


class Presence:
    """One client; each block that needs it is a `with`.

    Attributes:
        is_gone: the client left.
    """

    def __init__(self, receive: Receive) -> None:
        """Begins to watch at the first block, so the body must have been received by then."""
        self.is_gone = False
        self._receive = receive
        self._watch: asyncio.Task[None] | None = None
        self._serving: asyncio.Task[Any] | None = None
        self._has_cancelled = False

    def __enter__(self) -> None:
        if self.is_gone:
            raise _left()
        self._serving = asyncio.current_task()
        if self._watch is None:
            self._watch = asyncio.get_running_loop().create_task(self._follow())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        serving, self._serving = self._serving, None
        if not self._has_cancelled or serving is None:
            return
        self._has_cancelled = False
        if serving.uncancel() == 0 and kind is asyncio.CancelledError:
            raise _left() from error

    def close(self) -> None:
        """Watches no more; safe twice, and the last thing asked of it."""
        watch, self._watch = self._watch, None
        if watch is not None:
            # A task that was cancelled remembers where: its frame holds us, so we let go of it, or
            # each request would be a cycle that waits for the garbage collector.
            watch.cancel()

    async def _follow(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.is_gone = True
        if self._serving is not None:
            self._has_cancelled = True
            self._serving.cancel()


def _left() -> Cancelled:
    return Cancelled("The client left")
