"""One worker process of the sandbox, seen from the service: start, one image, kill, close."""

import asyncio
import contextlib
import fcntl
import logging
import mmap
import os
import signal
import sys
from dataclasses import dataclass
from typing import NoReturn

import msgspec
import numpy as np

from k3text.images.config import ProcessorConfig
from k3text.images.header import ImageLimits
from k3text.images.patchify import CHANNELS
from k3text.images.processor import PatchedImage
from k3text.images.sandbox_protocol import (
    LENGTH,
    MAX_MESSAGE_BYTES,
    Done,
    Job,
    Ready,
    Reply,
    Setup,
    frame,
)
from k3wire.errors import (
    DeadlineExceeded,
    ErrorInfo,
    ImageParseError,
    InternalError,
    WorkerLost,
    from_info,
)

logger = logging.getLogger(__name__)

WORKER_MODULE = "k3text.images.sandbox_worker"
START_S = 20.0
"""How long a worker may take to start; a third of a second is usual."""

LARGE_BYTES = 1 << 20
"""Bytes from which a copy leaves the event loop."""

KEPT_BYTES = 8 << 20
"""Longest content whose memory a worker keeps for its next image; taking it anew costs a tenth of
the whole work. What is longer goes back to the system."""

_KEPT_VARIABLES = (
    *("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL"),
    # Where the compiled steps are kept.
    *("HOME", "TMPDIR", "XDG_CACHE_HOME"),
)
"""Of the service's environment; keys and addresses in the rest are none of a decoder's business."""


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """What one worker may take for one image.

    Attributes:
        memory_bytes: address space that decoding may add.
        cpu_s: processor time, whole seconds.
        wall_s: time by the clock.
    """

    memory_bytes: int = 1536 * 1024 * 1024
    cpu_s: int = 10
    wall_s: float = 20.0


class SandboxProcess:
    """A worker and the two shared memory files that it is given."""

    def __init__(
        self, processor: ProcessorConfig, image_limits: ImageLimits, limits: ProcessLimits
    ) -> None:
        """Prepares; `start` makes the process.

        Args:
            processor: how images become patches.
            image_limits: what is refused.
            limits: what decoding may take.
        """
        self._limits = limits
        self._input = _SharedFile("k3-image-in", image_limits.max_bytes)
        self._output = _SharedFile("k3-image-out", _largest_output_bytes(processor))
        self._setup = Setup(
            config=processor,
            limits=image_limits,
            input_fd=self._input.fd,
            input_bytes=self._input.size_bytes,
            output_fd=self._output.fd,
            output_bytes=self._output.size_bytes,
            memory_bytes=limits.memory_bytes,
            cpu_s=limits.cpu_s,
        )
        self._process: asyncio.subprocess.Process | None = None
        self._pid_fd = -1

    @property
    def is_running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int | None:
        """Of the process, None before the first start."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Starts the process and waits until it has locked itself in.

        Raises:
            WorkerLost: it did not start.
        """
        environment = {k: os.environ[k] for k in _KEPT_VARIABLES if k in os.environ}
        environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", WORKER_MODULE, str(os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                pass_fds=(self._input.fd, self._output.fd),
                env=environment,
                start_new_session=True,
            )  # fmt: skip
            self._pid_fd = os.pidfd_open(self._process.pid)
            async with asyncio.timeout(START_S):
                await self._send(self._setup)
                reply = await self._receive()
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            await self.stop()
            raise WorkerLost("The image decoder did not start; try again") from error
        except asyncio.CancelledError:
            await self.stop()
            raise
        assert isinstance(reply, Ready), "a worker says first that it is ready"

    async def cut(self, data: bytes) -> PatchedImage:
        """Makes the byte patches of one image; the process may be gone afterwards.

        Raises:
            ImageError: one of its leaves; see `k3text.images.processor.cut`.
            DeadlineExceeded: it took too long by the clock.
            WorkerLost: the process was taken away.
        """
        # Not bounded like the rest: a copy that was given up would go on under the next image.
        await self._input.write(data)
        try:
            async with asyncio.timeout(self._limits.wall_s):
                await self._send(Job(num_bytes=len(data)))
                reply = await self._receive()
                return await self._take(reply)
        except TimeoutError as error:
            logger.warning("image decoder hangs", extra={"size_bytes": len(data)})
            await self.stop()
            raise DeadlineExceeded("The image took too long to decode; try again") from error
        except (OSError, asyncio.IncompleteReadError) as error:
            status = await self.stop()
            self._explain(status, error)
        finally:
            self._input.clear(len(data))

    def kill(self) -> None:
        """Ends the process at once; whoever waits in `cut` gets an error."""
        # Not by asyncio's own kill: it may reap the process before asyncio waits for it.
        if self._pid_fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pid_fd, signal.SIGKILL)

    async def stop(self) -> int:
        """Kills the process, waits for its end and gives its status; safe twice."""
        if self._process is None:
            return 0
        self.kill()
        status = await self._process.wait()
        if self._pid_fd >= 0:
            os.close(self._pid_fd)
            self._pid_fd = -1
        if self._process.stdin is not None:
            self._process.stdin.close()
        return status

    async def close(self) -> None:
        """Stops and gives the memory back; safe twice."""
        await self.stop()
        self._input.close()
        self._output.close()

    async def _send(self, message: msgspec.Struct) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(frame(message))
        await self._process.stdin.drain()

    async def _receive(self) -> Reply:
        assert self._process is not None
        assert self._process.stdout is not None
        head = await self._process.stdout.readexactly(LENGTH.size)
        (length,) = LENGTH.unpack(head)
        if length > MAX_MESSAGE_BYTES:
            raise OSError("a worker's reply is too long")
        data = await self._process.stdout.readexactly(length)
        try:
            return msgspec.msgpack.decode(data, type=Reply)
        except msgspec.DecodeError as error:
            raise OSError("a worker's reply is malformed") from error

    async def _take(self, reply: Reply) -> PatchedImage:
        match reply:
            case ErrorInfo():
                raise from_info(reply)
            case Ready():
                raise OSError("a worker is ready twice")
            case Done():
                return await self._read_patches(reply)

    async def _read_patches(self, done: Done) -> PatchedImage:
        patch = self._setup.config.patch_size
        _, rows, columns = done.grid_thw
        shape = (rows * columns, CHANNELS, patch, patch)
        num_bytes = rows * columns * CHANNELS * patch * patch
        if rows < 1 or columns < 1 or num_bytes > self._output.size_bytes:
            raise OSError("a worker's reply does not fit its output")
        data = await self._output.read(num_bytes)
        self._output.clear(num_bytes)
        return PatchedImage(
            pixels=np.frombuffer(data, dtype=np.uint8).reshape(shape),
            grid_thw=done.grid_thw,
            width=done.width,
            height=done.height,
            num_tokens=done.num_tokens,
        )

    def _explain(self, status: int, error: Exception) -> NoReturn:
        """Says what became of an image whose worker died."""
        if status == -signal.SIGXCPU:
            raise ImageParseError("The image takes too long to decode") from error
        if status in (-signal.SIGKILL, -signal.SIGTERM):
            raise WorkerLost("The image decoder was stopped; try again") from error
        logger.warning("image decoder died", extra={"status": status})
        if status >= 0:
            raise InternalError("The image decoder ended unexpectedly") from error
        raise ImageParseError("The image is damaged; decoding it fails") from error


class _SharedFile:
    """Anonymous memory shared with a worker, of a size that neither side can change."""

    def __init__(self, name: str, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size_bytes)
        # A worker that cut the file off would kill the service with SIGBUS.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        self._map = mmap.mmap(self.fd, size_bytes)

    async def write(self, data: bytes) -> None:
        """Copies bytes in, from the start."""
        if len(data) > self.size_bytes:
            raise InternalError("The image is longer than the decoder's input")
        if len(data) < LARGE_BYTES:
            os.pwrite(self.fd, data, 0)
        else:
            await asyncio.to_thread(os.pwrite, self.fd, data, 0)

    async def read(self, num_bytes: int) -> bytes:
        """Copies bytes out, from the start."""
        if num_bytes < LARGE_BYTES:
            return os.pread(self.fd, num_bytes, 0)
        return await asyncio.to_thread(os.pread, self.fd, num_bytes, 0)

    def clear(self, num_bytes: int) -> None:
        """Gives a large image's memory back to the system."""
        if num_bytes > KEPT_BYTES and not self._map.closed:
            self._map.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Ends the file; safe twice."""
        if not self._map.closed:
            self._map.close()
            os.close(self.fd)


def _largest_output_bytes(processor: ProcessorConfig) -> int:
    side = processor.max_patches_a_side + processor.merge_size
    return side * side * CHANNELS * processor.patch_size**2
