"""Registered memory through which patches leave and shared ones arrive, a piece at a time.

A large image has 158 MB of patches, so whole images are never staged: a piece is filled, written
and reused. Waiting for a window bounds how much is on its way at once.
"""

import asyncio
import contextlib
import mmap
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from k3core.transfer.base import Region

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """A piece of registered memory, owned by whoever took it until it is given back.

    Attributes:
        address: of its first byte.
        view: its bytes.
    """

    address: int
    view: npt.NDArray[np.uint8]


class Windows:
    """A number of windows of one size.

    Attributes:
        region: all of them, to be registered with the data plane before use.
        window_bytes: of each.
    """

    def __init__(self, window_bytes: int, num_windows: int) -> None:
        """Maps the memory; pages of the system are taken as they are touched."""
        memory = np.frombuffer(mmap.mmap(-1, window_bytes * num_windows), dtype=np.uint8)
        address = int(memory.ctypes.data)
        self.region = Region(address, memory.size)
        self.window_bytes = window_bytes
        self._free: asyncio.LifoQueue[Window] = asyncio.LifoQueue()
        for start in range(0, memory.size, window_bytes):
            self._free.put_nowait(Window(address + start, memory[start : start + window_bytes]))

    @property
    def num_free(self) -> int:
        """Windows that nobody has."""
        return self._free.qsize()

    @contextlib.asynccontextmanager
    async def take(self) -> AsyncGenerator[Window]:
        """Gives a window for the length of a block; waits for one."""
        window = await self._free.get()
        try:
            yield window
        finally:
            self._free.put_nowait(window)


async def run_to_end(work: Callable[[], T]) -> T:
    """Runs work on a window in a thread, and waits for its end even when cancelled.

    A thread cannot be stopped; a window given back under it would carry two images.
    """
    future = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise
