"""The door of the prefill worker: who is let in, who is told what, who is sent away.

Calls are idempotent by (request id, attempt): the repeat of a running one is answered as the
first was, an attempt that ended or is older than the running one is refused, a newer one replaces
the older. Cancels may come before, during, after
or twice. Every journey runs in this handler's task group and answers for its own failures.
"""

import asyncio
import logging
import time
from collections import OrderedDict

from k3_prefill.journey import Journey, Worker
from k3core.engine.frames import FrameSender, gateway_of
from k3core.engine.words import EngineEvent
from k3wire.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ShuttingDown,
    SlowDown,
)
from k3wire.messages.base import Admitted
from k3wire.messages.control import Cancel, WorkerLoad
from k3wire.messages.prefill import PrefillRequest
from k3wire.telemetry import metrics

logger = logging.getLogger(__name__)

NUM_REMEMBERED = 4096
"""Ended or cancelled attempts that are remembered, so that a late repeat does not run again."""


class PrefillHandler:
    """Admits requests, runs their journeys and routes the engine's events to them."""

    def __init__(
        self, worker: Worker, sender: FrameSender, *, epoch: int, max_requests: int
    ) -> None:
        """Joins the parts; nothing runs before `run`.

        Args:
            worker: what the journeys share.
            sender: what publishes their deltas.
            epoch: this process's start.
            max_requests: journeys at a time; more are refused.
        """
        self._worker = worker
        self._sender = sender
        self._epoch = epoch
        self._max_requests = max_requests
        self._journeys: dict[str, Journey] = {}
        self._by_key: dict[str, Journey] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._group: asyncio.TaskGroup | None = None
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def run(self) -> None:
        """Owns the journeys' tasks until it is cancelled, which cancels them."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            group.create_task(self._sender.run())

    async def prefill(self, request: PrefillRequest) -> Admitted:
        """Admits a request; its results go to its stream.

        Raises:
            ShuttingDown: draining.
            Overloaded: another model is served here, or the engine is down.
            SlowDown: too many requests at a time.
            DeadlineExceeded: the message came too late.
            InvalidRequest: no token is left to be generated.
            Cancelled: this attempt was cancelled or replaced already.
        """
        admitted = Admitted(worker_id=self._worker.worker_id, epoch=self._epoch)
        running = self._journeys.get(request.request_id)
        key = f"{request.request_id}#{request.attempt}"
        if running is not None and running.request.attempt == request.attempt:
            return admitted
        if running is not None and running.request.attempt > request.attempt:
            raise Cancelled("A newer attempt of this request is running.")
        if key in self._ended or request.request_id in self._ended:
            raise Cancelled("This attempt has ended already.")
        self._check_can_admit(request)
        if running is not None:
            self._stop(running)
        self._begin(request)
        return admitted

    def cancel(self, message: Cancel) -> None:
        """Stops a request, or remembers that it must not start."""
        running = self._journeys.get(message.request_id)
        if running is not None and message.attempt in (None, running.request.attempt):
            self._stop(running)
        if message.attempt is None:
            # All of its attempts, the ones that have not come yet too.
            self._remember(message.request_id)
        elif running is None:
            self._remember(f"{message.request_id}#{message.attempt}")

    def hear(self, events: tuple[EngineEvent, ...]) -> None:
        """Routes the events of one step and ends the step for the stream."""
        for event in events:
            journey = self._by_key.get(event.key)
            if journey is not None:
                journey.hear(event)
        self._sender.flush()

    def load(self, rss_bytes: int) -> WorkerLoad:
        """The worker's figures for its heartbeat."""
        engine = self._worker.core.load
        metrics.PAGES.set(engine.num_pages)
        metrics.PAGES_FREE.set(engine.num_free_pages)
        active: dict[str, int] = {}
        for journey in self._journeys.values():
            gateway = gateway_of(journey.request.stream_subject)
            active[gateway] = active.get(gateway, 0) + 1
        return WorkerLoad(
            num_running=engine.num_running,
            num_waiting=max(0, len(self._journeys) - engine.num_running),
            num_queued_tokens=engine.num_queued_tokens,
            num_free_pages=engine.num_free_pages,
            num_pages=engine.num_pages,
            tokens_per_s=engine.tokens_per_s,
            active_by_gateway=active,
            rss_bytes=rss_bytes,
        )

    async def drain(self) -> None:
        """Takes no more and returns when every journey and frame is gone; the caller bounds it."""
        self._is_draining = True
        await self._is_idle.wait()
        await self._sender.wait_sent()

    def fail_all(self) -> None:
        """Ends every journey: the engine is down, and nothing it held can be used."""
        for journey in list(self._journeys.values()):
            journey.hear(EngineEvent(kind="failed", key=journey.key))

    def _check_can_admit(self, request: PrefillRequest) -> None:
        if self._is_draining:
            raise ShuttingDown("This worker is shutting down; try another.")
        if self._group is None or not self._worker.engine.is_running:
            raise Overloaded("This worker is not ready.")
        if request.model_fingerprint != self._worker.layout.model_fingerprint:
            raise ModelNotFound("This worker serves another model or another version of it.")
        if request.deadline_unix_ns <= time.time_ns():
            raise DeadlineExceeded("The request came after its deadline.")
        if request.num_emitted_tokens >= request.sampling.max_tokens:
            raise InvalidRequest("The answer has reached its limit already.")
        if len(self._journeys) >= self._max_requests:
            raise SlowDown("Too many requests are being read; try again.", retry_after_s=1.0)

    def _begin(self, request: PrefillRequest) -> None:
        assert self._group is not None, "admission was checked"
        journey = Journey(self._worker, request)
        self._journeys[request.request_id] = journey
        self._by_key[journey.key] = journey
        self._is_idle.clear()
        task = self._group.create_task(journey.run())
        self._tasks[journey.key] = task
        task.add_done_callback(lambda _: self._end(journey))

    def _stop(self, journey: Journey) -> None:
        self._remember(journey.key)
        task = self._tasks.get(journey.key)
        if task is not None:
            task.cancel()

    def _end(self, journey: Journey) -> None:
        self._remember(journey.key)
        del self._tasks[journey.key]
        del self._by_key[journey.key]
        if self._journeys.get(journey.request.request_id) is journey:
            del self._journeys[journey.request.request_id]
        if not self._tasks:
            self._is_idle.set()

    def _remember(self, key: str) -> None:
        self._ended[key] = None
        while len(self._ended) > NUM_REMEMBERED:
            self._ended.popitem(last=False)
