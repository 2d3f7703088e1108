"""Running handlers of one subscription: concurrent, bounded, counted, one broad except.

Every handler is a task of the intake, kept alive by it and waited for at drain. Past the limit of
running handlers messages wait; past the limit of waiting ones they are refused.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from k3wire.bus import codec
from k3wire.errors import DeadlineExceeded, InternalError, K3Error, ShuttingDown, SlowDown
from k3wire.messages.base import Message

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

MAX_WAITING_FACTOR = 8
"""Messages that may wait for each that may run."""


class Intake:
    """The running handlers of one subscription."""

    def __init__(self, name: str, max_concurrency: int) -> None:
        """Starts empty.

        Args:
            name: of the call, for logs.
            max_concurrency: handlers that run at once.
        """
        self._name = name
        self._slots = asyncio.Semaphore(max_concurrency)
        self._max_tasks = max_concurrency * (1 + MAX_WAITING_FACTOR)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_draining = False

    @property
    def num_tasks(self) -> int:
        """Handlers running or waiting."""
        return len(self._tasks)

    def start(
        self,
        run: Callable[[], Awaitable[bytes]],
        answer: Callable[[bytes], Awaitable[None]],
        refuse: Callable[[K3Error], bytes],
        deadline_unix_ns: int,
    ) -> None:
        """Starts a handler and answers with what it returns or raises; never blocks.

        Args:
            run: the handler; gives the encoded reply.
            answer: sends a reply.
            refuse: encodes an error.
            deadline_unix_ns: when the caller stops waiting.
        """
        limit: K3Error | None = None
        if self._is_draining:
            limit = ShuttingDown("This worker is shutting down; ask another")
        elif len(self._tasks) >= self._max_tasks:
            limit = SlowDown("Too many requests are waiting; try again later", retry_after_s=1)
        job = self._refuse(limit, answer, refuse) if limit else None
        task = asyncio.get_running_loop().create_task(
            job or self._serve(run, answer, refuse, deadline_unix_ns)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _refuse(
        self,
        error: K3Error,
        answer: Callable[[bytes], Awaitable[None]],
        refuse: Callable[[K3Error], bytes],
    ) -> None:
        await answer(refuse(error))

    async def _serve(
        self,
        run: Callable[[], Awaitable[bytes]],
        answer: Callable[[bytes], Awaitable[None]],
        refuse: Callable[[K3Error], bytes],
        deadline_unix_ns: int,
    ) -> None:
        left_s = (deadline_unix_ns - time.time_ns()) / 1e9
        deadline_s = asyncio.get_running_loop().time() + left_s
        try:
            async with asyncio.timeout_at(deadline_s), self._slots:
                reply = await run()
        except K3Error as error:
            reply = refuse(error)
        except TimeoutError:
            reply = refuse(DeadlineExceeded("The request's time ran out"))
        except Exception:
            logger.exception("handler failed", extra={"call": self._name})
            reply = refuse(InternalError("Something went wrong on our side"))
        await answer(reply)

    async def drain(self) -> None:
        """Refuses what comes from now on and returns when every handler has ended."""
        self._is_draining = True
        while self._tasks:
            await asyncio.wait(set(self._tasks))


def hear(data: bytes, message_type: type[M], handler: Callable[[M], None]) -> None:
    """Hands one event to its handler; what cannot be read or fails is logged and dropped."""
    try:
        handler(codec.decode(data, message_type))
    except K3Error:
        logger.warning("unreadable message dropped", extra={"type": message_type.__name__})
    except Exception:
        logger.exception("listener failed", extra={"type": message_type.__name__})
