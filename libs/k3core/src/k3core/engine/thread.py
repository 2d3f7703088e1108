"""The border between a worker's event loop and its engine: one thread, two one-way streets.

The loop never computes and the engine never awaits. Work crosses to the engine as callables in
an inbox that the thread empties between two steps; words cross back as few hand-overs of events
in each step, run on the loop by `call_soon_threadsafe`. Everything that a core owns (scheduler,
cache index, runner) is touched by its thread only, so none of it needs a lock.

What always holds: `start` returns when the core is open; a core that fails takes no more steps,
and the failure reaches the loop once; `close` returns when the thread has ended, safe twice.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from k3wire.errors import InternalError, K3Error, ShuttingDown, SlowDown

logger = logging.getLogger(__name__)

E = TypeVar("E")
E_co = TypeVar("E_co", covariant=True)
T = TypeVar("T")

MAX_INBOX = 4096
"""Calls that may wait for the engine; one more is refused. Far above any admission limit."""


class Core(Protocol[E_co]):
    """What runs on the thread. Implementations: `core.EngineCore`, and a toy in the tests."""

    def open(self) -> None:
        """Loads and warms up; runs once, first, on the thread."""
        ...

    def step(self, tell: Callable[[tuple[E_co, ...]], None]) -> float | None:
        """Does one step of work, or none if there is none.

        Args:
            tell: hands events to the loop, in order; what the loop should act on while the step
                still computes is told before that.

        Returns:
            `time.monotonic()` value at which the next step is worth taking: 0.0 for at once, None
            for not before new work comes in.
        """
        ...

    def close(self) -> None:
        """Lets everything go; runs once, last, on the thread, even after a failure."""
        ...


class EngineThread(Generic[E]):
    """Runs one core and hands its events to one event loop."""

    def __init__(
        self,
        core: Core[E],
        on_events: Callable[[tuple[E, ...]], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """Prepares the thread; nothing runs before `start`.

        Args:
            core: what to run.
            on_events: called on the loop with the events of each step that had some.
            on_failure: called on the loop, once, if a step raises; the engine is then down.
        """
        self._core = core
        self._on_events = on_events
        self._on_failure = on_failure
        self._inbox: deque[Callable[[], object]] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closing = False
        self._is_down = False

    @property
    def is_running(self) -> bool:
        """Whether the engine takes steps: started, not failed and not closing."""
        return self._thread is not None and not self._is_down and not self._is_closing

    async def start(self) -> None:
        """Starts the thread and returns when the core is open.

        Raises:
            K3Error: what the core raised while opening; `InternalError` from anything else.
        """
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="engine")
        self._thread.start()
        await ready

    async def call(self, work: Callable[[], T]) -> T:
        """Runs `work` on the engine's thread between two steps and returns its result.

        Cancelling the caller does not stop work that was handed over.

        Raises:
            SlowDown: too many calls wait.
            ShuttingDown: the engine is closing or down.
            Exception: whatever `work` raises.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001  # the caller's, re-raised by its future
                self._tell(_fail, done, error)
            else:
                self._tell(_resolve, done, result)

        if len(self._inbox) >= MAX_INBOX:
            raise SlowDown("The engine's queue is full; try again shortly.", retry_after_s=1.0)
        if not self._put(run):
            raise ShuttingDown("The engine is stopping.")
        return await done

    def post(self, work: Callable[[], object]) -> bool:
        """Hands work over without waiting for it; for aborts and releases, which must not fail.

        Returns:
            Whether the engine will run it; False once it is closing or down.
        """
        return self._put(work)

    async def close(self) -> None:
        """Lets the current step end, then stops the thread; safe twice and before `start`."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        thread = self._thread
        if thread is not None and thread.is_alive():
            await asyncio.to_thread(thread.join)

    def _put(self, work: Callable[[], object]) -> bool:
        with self._wake:
            if self._is_closing or self._is_down:
                return False
            self._inbox.append(work)
            self._wake.notify()
            return True

    def _run(self, ready: "asyncio.Future[None]") -> None:
        try:
            self._core.open()
        except BaseException as error:  # noqa: BLE001  # reported to whoever awaits `start`
            self._is_down = True
            self._tell(_fail, ready, _as_ours(error, "The engine could not start."))
            self._shut()
            return
        self._tell(_resolve, ready, None)
        try:
            self._steps()
        except BaseException as error:  # the engine's one boundary: nothing may die unheard
            logger.exception("engine failed")
            self._is_down = True
            self._tell(self._on_failure, error)
        self._shut()

    def _steps(self) -> None:
        wake_at_s: float | None = 0.0
        while True:
            for work in self._take(wake_at_s):
                work()
            if self._is_closing:
                return
            wake_at_s = self._core.step(self._tell_events)

    def _take(self, wake_at_s: float | None) -> list[Callable[[], object]]:
        """Waits until there is something to do and empties the inbox."""
        with self._wake:
            while not self._inbox and not self._is_closing:
                if wake_at_s is None:
                    self._wake.wait()
                    continue
                left_s = wake_at_s - time.monotonic()
                if left_s <= 0:
                    break
                self._wake.wait(left_s)
            taken = list(self._inbox)
            self._inbox.clear()
            return taken

    def _shut(self) -> None:
        """Runs what still waits, so that no caller hangs, and closes the core."""
        with self._wake:
            self._is_closing = True
            left = list(self._inbox)
            self._inbox.clear()
        for work in left:
            work()
        try:
            self._core.close()
        except Exception:
            logger.exception("engine did not close cleanly")

    def _tell_events(self, events: tuple[E, ...]) -> None:
        self._tell(self._on_events, events)

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        loop = self._loop
        assert loop is not None, "the thread runs only after start"
        try:
            loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            # The loop is closed: nobody is left to hear it.
            logger.debug("engine event dropped, loop closed")


def _resolve(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[T]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def _as_ours(error: BaseException, message: str) -> K3Error:
    if isinstance(error, K3Error):
        return error
    ours = InternalError(message)
    ours.__cause__ = error
    return ours
