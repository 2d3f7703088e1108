"""The chassis: what all six services share, from the start of the process to its end.

A service's main makes a `ServiceRuntime`, registers its calls and says when it is ready; the
runtime owns the bus, signals, heartbeats, cancels, spans, probes and the drain:

    async with ServiceRuntime("fetcher", settings) as runtime:
        await runtime.serve_shared(subjects.RESOLVE, handler.resolve)
        runtime.ready()
        await runtime.run()

Always true: the process is announced as ready only after `ready`; a drain takes no more work,
finishes what runs inside the grace period, and then closes everything in reverse order. It beats
until the very end, so that silence always means death, also of one that drains.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self, TypeVar

from k3wire import subjects
from k3wire.bus.base import Bus, Headers, Subscription
from k3wire.errors import K3Error
from k3wire.ids import new_worker_id
from k3wire.messages.base import Message, Stage
from k3wire.messages.control import HEARTBEAT_INTERVAL_S, Cancel, Heartbeat, WorkerLoad
from k3wire.service.health import HealthServer
from k3wire.service.settings import CommonSettings
from k3wire.subjects import Call
from k3wire.telemetry import logs, metrics
from k3wire.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)

FAREWELL_BEATS = 2
"""Beats sent with `is_draining` before subscriptions end, so that routers have heard it."""


def resident_bytes() -> int:
    """Resident memory of this process, from the kernel's table; 0 where there is none."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


class ServiceRuntime:
    """One process of one role.

    Attributes:
        role: which service.
        worker_id: fresh at each start.
        epoch: wall-clock nanoseconds of the start.
        bus: the connection.
        tracing: spans.
        model_fingerprint: told in the heartbeat; set before `ready`.
        endpoint: HTTP address told in the heartbeat, for gateways.
    """

    def __init__(
        self,
        role: Stage,
        settings: CommonSettings,
        bus: Bus,
        *,
        load: Callable[[], WorkerLoad] = WorkerLoad,
    ) -> None:
        """Prepares; entering the context starts.

        Args:
            role: which service.
            settings: of the service.
            bus: connected; whoever made it closes it after the runtime has ended.
            load: gives the load for each beat; quick, called on the loop.
        """
        self.role: Stage = role
        self.worker_id = new_worker_id(role)
        self.epoch = time.time_ns()
        self.bus = bus
        self.model_fingerprint = ""
        self.endpoint = ""
        self._settings = settings
        self._load = load
        self._host = socket.gethostname()
        self._seq = 0
        self._is_ready = False
        self._is_draining = False
        self._reason = "starting"
        self._stop = asyncio.Event()
        self._subscriptions: list[Subscription] = []
        self._on_stop: list[Callable[[], Awaitable[None]]] = []
        self._on_drain: list[Callable[[], Awaitable[None]]] = []
        self._health = HealthServer(self._why_not_ready, metrics.REGISTRY)
        self.tracing = Tracing(role, self.worker_id, settings.trace_dir, settings.trace_ratio)

    async def __aenter__(self) -> Self:
        logs.start_logging(
            self.role, self.worker_id, self._settings.log_level, self._settings.log_format
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                loop.add_signal_handler(number, self.stop)
        await self._health.start(self._settings.health_host, self._settings.health_port)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._health.stop()
        await asyncio.to_thread(self.tracing.close)

    def _why_not_ready(self) -> str:
        if self._is_draining:
            return "draining"
        return "" if self._is_ready else self._reason

    @property
    def health_port(self) -> int:
        """Port of the probes."""
        return self._health.port

    @property
    def is_draining(self) -> bool:
        """Whether the process takes no more work."""
        return self._is_draining

    def ready(self) -> None:
        """Says that the service can serve from now on."""
        self._is_ready = True
        logger.info("ready", extra={"after_s": round((time.time_ns() - self.epoch) / 1e9, 2)})

    def not_ready(self, reason: str) -> None:
        """Says that the service cannot serve for now, and why."""
        self._is_ready = False
        self._reason = reason

    def stop(self) -> None:
        """Asks for a drain; what SIGTERM and Ctrl-C do; safe twice."""
        self._stop.set()

    def on_drain(self, action: Callable[[], Awaitable[None]]) -> None:
        """Adds something to wait for at a drain, after the calls have ended; run in order."""
        self._on_drain.append(action)

    def on_stop(self, action: Callable[[], Awaitable[None]]) -> None:
        """Adds something to wait for at a drain before the calls end, like an HTTP server."""
        self._on_stop.append(action)

    async def serve_shared(
        self,
        call: Call[Q, R],
        handler: Callable[[Q], Awaitable[R]],
        *,
        max_concurrency: int = 256,
    ) -> None:
        """Answers a call that any worker of the role may answer."""
        await self._serve(subjects.shared(call), call, handler, self.role, max_concurrency)

    async def serve_direct(
        self,
        call: Call[Q, R],
        handler: Callable[[Q], Awaitable[R]],
        *,
        max_concurrency: int = 256,
    ) -> None:
        """Answers a call that is addressed to this worker."""
        subject = subjects.direct(call, self.worker_id)
        await self._serve(subject, call, handler, "", max_concurrency)

    async def _serve(
        self,
        subject: str,
        call: Call[Q, R],
        handler: Callable[[Q], Awaitable[R]],
        queue: str,
        max_concurrency: int,
    ) -> None:
        name = f"{self.role} {call.name}"

        async def traced(request: Q, headers: Headers) -> R:
            with self.tracing.span(name, headers, is_server=True) as span:
                try:
                    return await handler(request)
                except K3Error as error:
                    span.set_attribute("error.type", error.code)
                    raise
                except Exception:
                    # The bus's boundary logs it and answers; here it is only counted.
                    metrics.HANDLER_FAULTS.inc()
                    raise

        subscription = await self.bus.serve(
            subject, call, traced, queue=queue, max_concurrency=max_concurrency
        )
        self._subscriptions.append(subscription)

    async def listen_cancel(self, handler: Callable[[Cancel], None]) -> None:
        """Hears cancels of the role; the handler must not block."""
        subscription = await self.bus.listen(subjects.cancel(self.role), Cancel, handler)
        self._subscriptions.append(subscription)

    async def keep(self, subscription: Subscription) -> None:
        """Takes over a subscription: it is drained with the others."""
        self._subscriptions.append(subscription)

    async def run(self) -> None:
        """Beats and serves until the stop, then drains, beating on until it is gone."""
        async with asyncio.TaskGroup() as group:
            beating = group.create_task(self._keep_beating())
            await self._stop.wait()
            await self._drain()
            beating.cancel()
        self._is_ready = False
        await self._beat()
        logger.info("stopped")

    async def _keep_beating(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + HEARTBEAT_INTERVAL_S
            await self._beat()
            await asyncio.sleep(max(0.0, due_s - loop.time()))

    async def _beat(self) -> None:
        self._seq += 1
        load = self._load()
        beat = Heartbeat(
            role=self.role,
            worker_id=self.worker_id,
            epoch=self.epoch,
            seq=self._seq,
            sent_unix_ns=time.time_ns(),
            pid=os.getpid(),
            host=self._host,
            is_ready=self._is_ready,
            is_draining=self._is_draining,
            reason=self._why_not_ready(),
            model_fingerprint=self.model_fingerprint,
            endpoint=self.endpoint,
            load=load,
        )
        try:
            await self.bus.publish(subjects.heartbeat(self.role, self.worker_id), beat)
        except K3Error:
            logger.debug("heartbeat not sent")

    async def _drain(self) -> None:
        self._is_draining = True
        logger.info("draining", extra={"grace_s": self._settings.grace_s})
        for _ in range(FAREWELL_BEATS):
            await self._beat()
        try:
            async with asyncio.timeout(self._settings.grace_s):
                for action in self._on_stop:
                    await action()
                async with asyncio.TaskGroup() as group:
                    for subscription in self._subscriptions:
                        group.create_task(subscription.drain())
                for action in self._on_drain:
                    await action()
        except TimeoutError:
            logger.warning("grace period over, stopping with work left")
