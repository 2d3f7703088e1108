"""A pool of locked-in processes that decode images; nothing hostile runs in the service itself.

Encoded bytes enter, byte patches leave, or an error of the image family. Always true: one image at
a time in a worker; a worker that hangs, dies or is no longer waited for is killed and replaced;
images wait in a bounded queue and are refused with `SlowDown` beyond it; a cancelled image that
waits is never started. Bytes cross in shared memory whose size is sealed.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Self

from k3text.images.config import ProcessorConfig
from k3text.images.header import ImageLimits, read_header
from k3text.images.native.steps import native_steps
from k3text.images.processor import PatchedImage
from k3text.images.sandbox_process import ProcessLimits, SandboxProcess
from k3wire.errors import K3Error, ShuttingDown, SlowDown, WorkerLost

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SandboxConfig:
    """How much the sandbox may take.

    Attributes:
        num_workers: processes, so images decoded at once.
        max_waiting: images that may wait; more are refused.
        limits: of each worker.
    """

    num_workers: int = 2
    max_waiting: int = 64
    limits: ProcessLimits = field(default_factory=ProcessLimits)


@dataclass(frozen=True, slots=True)
class CutImage:
    """What the sandbox gives.

    Attributes:
        patched: the byte patches.
        wait_ns: time in the queue.
        work_ns: time in the worker, with the copies in and out.
    """

    patched: PatchedImage
    wait_ns: int
    work_ns: int


@dataclass(eq=False, slots=True)
class _Job:
    data: bytes
    queued_ns: int
    result: "asyncio.Future[CutImage]"


class Sandbox:
    """The pool; an async context manager."""

    def __init__(
        self, processor: ProcessorConfig, limits: ImageLimits, config: SandboxConfig | None = None
    ) -> None:
        """Prepares; entering the context starts the workers.

        Args:
            processor: how images become patches.
            limits: which images are refused.
            config: how much the sandbox may take.
        """
        self._image_limits = limits
        self._config = config or SandboxConfig()
        self._processes = [
            SandboxProcess(processor, limits, self._config.limits)
            for _ in range(self._config.num_workers)
        ]
        self._jobs: asyncio.Queue[_Job | None] = asyncio.Queue()
        self._waiting: set[_Job] = set()
        self._running: set[_Job] = set()
        self._group = asyncio.TaskGroup()
        self._is_open = False

    async def __aenter__(self) -> Self:
        # Compiled here, if at all, so that the workers find it.
        await asyncio.to_thread(native_steps)
        try:
            async with asyncio.TaskGroup() as starts:
                for process in self._processes:
                    starts.create_task(process.start())
        except asyncio.CancelledError:
            await self._close_all()
            raise
        except BaseExceptionGroup as group:
            await self._close_all()
            # Every worker fails for the same reason; one of them says it.
            raise group.exceptions[0] from group
        await self._group.__aenter__()
        for process in self._processes:
            self._group.create_task(self._serve(process))
        self._is_open = True
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._is_open = False
        for job in [*self._waiting, *self._running]:
            _fail(job, ShuttingDown("This worker is shutting down; ask another"))
        for process in self._processes:
            self._jobs.put_nowait(None)
            process.kill()
        try:
            await self._group.__aexit__(None, None, None)
        finally:
            await self._close_all()

    @property
    def num_waiting(self) -> int:
        """Images that wait for a worker."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Images in a worker."""
        return len(self._running)

    @property
    def pids(self) -> list[int]:
        """Processes of the workers that are there now."""
        return [p.pid for p in self._processes if p.pid is not None and p.is_running]

    async def cut(self, data: bytes) -> CutImage:
        """Makes the byte patches of an image in a worker.

        Cancelling drops a waiting image, and kills the worker of a running one.

        Args:
            data: the whole encoded image; not changed meanwhile.

        Raises:
            ImageError: one of its leaves; see `k3text.images.processor.cut`. What the header shows
                is refused here, without a place in the queue.
            SlowDown: too many images wait.
            DeadlineExceeded: the image took too long by the clock.
            WorkerLost: the system took the worker away, or none could be started.
            ShuttingDown: the sandbox is closed or closing.
        """
        if not self._is_open:
            raise ShuttingDown("This worker is shutting down; ask another")
        read_header(data, self._image_limits)
        if len(self._waiting) >= self._config.max_waiting:
            raise SlowDown("Too many images are waiting; try again later", retry_after_s=1)
        job = _Job(data, time.perf_counter_ns(), asyncio.get_running_loop().create_future())
        self._waiting.add(job)
        self._jobs.put_nowait(job)
        try:
            return await job.result
        finally:
            # Frees the bytes and the place in the queue at once if the caller has left.
            self._waiting.discard(job)
            job.data = b""

    async def _serve(self, process: SandboxProcess) -> None:
        """Runs images on one worker until the end, starting it again whenever it is gone."""
        while (job := await self._jobs.get()) is not None:
            if not job.result.done():
                self._waiting.discard(job)
                self._running.add(job)
                await self._run(process, job)
                self._running.discard(job)
            if self._is_open and not process.is_running:
                await self._restart(process)

    async def _run(self, process: SandboxProcess, job: _Job) -> None:
        if not process.is_running and not await self._restart(process):
            _fail(job, WorkerLost("The image decoder does not start; try again"))
            return
        started_ns = time.perf_counter_ns()
        job.result.add_done_callback(lambda result: process.kill() if result.cancelled() else None)
        try:
            patched = await process.cut(job.data)
        except K3Error as error:
            _fail(job, error)
            return
        if not job.result.done():
            work_ns = time.perf_counter_ns() - started_ns
            job.result.set_result(CutImage(patched, started_ns - job.queued_ns, work_ns))

    async def _restart(self, process: SandboxProcess) -> bool:
        await process.stop()
        try:
            await process.start()
        except WorkerLost:
            logger.warning("image decoder does not start")
            return False
        return True

    async def _close_all(self) -> None:
        for process in self._processes:
            await process.close()


def _fail(job: _Job, error: K3Error) -> None:
    if not job.result.done():
        job.result.set_exception(error)
