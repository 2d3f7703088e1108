"""Mooncake behind our protocols: Transfer Engine and Store, over TCP or RDMA.

The native library has habits that this adapter keeps from everybody else. A method called on a
closed or unopened handle kills the interpreter: every call passes a gate. Set-up and close hold the
interpreter's lock: set-up probes the master's port first. Waits are busy loops: at most two native
calls run at once. A call cannot be cancelled: ours ends only when the native one has, so memory is
never reused under it. A put of an existing or half-written key says it succeeded: presence is
checked afterwards. A dead master costs seconds a call: a circuit opens after the first.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

from k3core.transfer.base import PutOutcome, Region, Write
from k3core.transfer.system_libraries import preload
from k3wire.errors import TierUnavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")

NATIVE_THREADS = 2
"""Native calls at once; more were measured to be slower on two cores."""

OPEN_S = 2.0
"""How long the store is left alone after its master did not answer."""

PROBE_TIMEOUT_S = 0.5

ENVIRONMENT = {
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
    "MC_TRANSFER_TIMEOUT": "5",
    "MC_RPC_TIMEOUT_MS": "3000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_LOG_LEVEL": "ERROR",
}
"""Bounds of the native library; must stand before it is imported. The operator's own win."""

MASTER_LOST = (-900, -901)
KEY_ABSENT = -704
STORE_FULL = -200
LOCAL_BUFFER_BYTES = 16 * 1024 * 1024
"""Smallest the library takes; all our transfers are from registered memory and do not use it."""


def _import_native(module: str) -> Any:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not preload():
        raise TierUnavailable(
            "Mooncake needs libibverbs.so.1: run `make setup`, or install the package libibverbs1"
        )
    try:
        # Imported here because the environment above must be set, and the libraries loaded, first.
        if module == "engine":
            import mooncake.engine as native
        else:
            import mooncake.store as native
    except ImportError as error:
        raise TierUnavailable("Mooncake is not installed; run `make setup`") from error
    return native


class _Gate:
    """Runs native calls in threads while open, waits for them before it closes."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(NATIVE_THREADS, thread_name_prefix=name)
        self._running: set[asyncio.Future[Any]] = set()
        self._is_open = True

    async def run(self, call: Callable[[], T]) -> T:
        """Runs a call to its native end, also when the caller is cancelled meanwhile."""
        if not self._is_open:
            raise TierUnavailable("The data plane is closed")
        future = asyncio.get_running_loop().run_in_executor(self._executor, call)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # The native call still reads or writes the caller's memory.
            await asyncio.wait([future])
            raise

    async def close(self, last: Callable[[], object]) -> None:
        """Refuses later calls, waits for running ones, then runs a last one; safe twice."""
        if not self._is_open:
            return
        self._is_open = False
        if self._running:
            await asyncio.wait(set(self._running))
        await asyncio.get_running_loop().run_in_executor(self._executor, last)
        self._executor.shutdown(wait=False)


class MooncakeTransferEngine:
    """Mooncake's Transfer Engine; see `TransferEngine`."""

    def __init__(self, native: Any, session: str) -> None:
        """Wraps an initialised engine; use `open`."""
        self._native = native
        self._session = session
        self._gate = _Gate("mooncake-transfer")
        self._regions: list[Region] = []

    @classmethod
    async def open(cls, host: str, protocol: str = "tcp", devices: str = "") -> Self:
        """Starts an engine on free ports of a host's address.

        Args:
            host: address that peers reach this process by.
            protocol: `tcp` or `rdma`.
            devices: RDMA devices, comma-separated, "" for none.

        Raises:
            TierUnavailable: Mooncake cannot be loaded or does not start.
        """

        def start() -> tuple[Any, int]:
            native = _import_native("engine").TransferEngine()
            return native, native.initialize(host, "P2PHANDSHAKE", protocol, devices)

        native, status = await asyncio.to_thread(start)
        if status != 0:
            raise TierUnavailable(f"Mooncake's transfer engine does not start (code {status})")
        return cls(native, f"{host}:{native.get_rpc_port()}")

    @property
    def session(self) -> str:
        """This process's name for its peers."""
        return self._session

    async def register(self, region: Region) -> None:
        """Registers memory; see `TransferEngine.register`."""
        status = await self._gate.run(
            lambda: self._native.register_memory(region.address, region.size_bytes)
        )
        if status != 0:
            raise TierUnavailable(f"Memory could not be registered (code {status})")
        self._regions.append(region)

    def _check_sources(self, writes: Sequence[Write]) -> None:
        # TCP takes unregistered memory silently and RDMA does not; the mistake must show on both.
        for write in writes:
            if not any(
                r.address <= write.source
                and write.source + write.size_bytes <= r.address + r.size_bytes
                for r in self._regions
            ):
                raise TierUnavailable("The source of a write is not registered")

    async def write(self, session: str, writes: Sequence[Write]) -> None:
        """Writes spans into a peer; see `TransferEngine.write`."""
        if not writes:
            return
        self._check_sources(writes)
        sources = [write.source for write in writes]
        destinations = [write.destination for write in writes]
        sizes = [write.size_bytes for write in writes]
        status = await self._gate.run(
            lambda: self._native.batch_transfer_sync_write(session, sources, destinations, sizes)
        )
        if status != 0:
            raise TierUnavailable("The other worker did not take the data")

    async def close(self) -> None:
        """Waits for running writes and closes; see `TransferEngine.close`."""

        def drop() -> None:
            for region in self._regions:
                self._native.unregister_memory(region.address)

        await self._gate.close(drop)


class MooncakeStore:
    """Mooncake's Store as a client without a segment of its own; see `ObjectStore`."""

    def __init__(self, master: str, host: str, protocol: str = "tcp") -> None:
        """Prepares; the first use connects, so that an absent master does not stop a start.

        Args:
            master: `host:port` of the master.
            host: address that peers reach this process by.
            protocol: `tcp` or `rdma`.
        """
        self._master = master
        self._host = host
        self._protocol = protocol
        self._native: Any = None
        self._gate = _Gate("mooncake-store")
        self._setup_lock = asyncio.Lock()
        self._open_until_s = 0.0
        self._regions: list[Region] = []

    @property
    def is_open(self) -> bool:
        """Whether the circuit is open: the master failed a moment ago and is left alone."""
        return time.monotonic() < self._open_until_s

    async def register(self, region: Region) -> None:
        """Names memory that objects are read into and written from; at any time."""
        self._regions.append(region)
        if self._native is not None:
            native = self._native
            await self._gate.run(lambda: native.register_buffer(region.address, region.size_bytes))

    def _trip(self) -> None:
        if not self.is_open:
            logger.warning("mooncake store unavailable", extra={"master": self._master})
        self._open_until_s = time.monotonic() + OPEN_S

    async def _ready(self) -> bool:
        if self.is_open:
            return False
        if self._native is not None:
            return True
        async with self._setup_lock:
            if self._native is None and not self.is_open:
                try:
                    self._native = await self._gate.run(self._connect)
                except TierUnavailable:
                    self._trip()
        return self._native is not None

    def _connect(self) -> Any:
        host, _, port = self._master.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=PROBE_TIMEOUT_S):
                pass
        except OSError as error:
            raise TierUnavailable("Mooncake's master does not answer") from error
        native = _import_native("store").MooncakeDistributedStore()
        status = native.setup(
            self._host, "P2PHANDSHAKE", 0, LOCAL_BUFFER_BYTES, self._protocol, "", self._master
        )
        if status != 0:
            raise TierUnavailable(f"Mooncake's store does not start (code {status})")
        for region in self._regions:
            native.register_buffer(region.address, region.size_bytes)
        return native

    async def put(self, objects: Sequence[tuple[str, Region]]) -> list[PutOutcome]:
        """Stores copies of registered memory; see `ObjectStore.put`."""
        if not objects or not await self._ready():
            return [PutOutcome.FAILED] * len(objects)
        keys = [key for key, _ in objects]
        present = await self.exists(keys)
        missing = [item for item, there in zip(objects, present, strict=True) if not there]
        outcomes = {
            key: PutOutcome.PRESENT for key, there in zip(keys, present, strict=True) if there
        }
        if missing:
            outcomes |= await self._put_missing(missing)
        return [outcomes[key] for key in keys]

    async def _put_missing(self, objects: Sequence[tuple[str, Region]]) -> dict[str, PutOutcome]:
        native = self._native
        keys = [key for key, _ in objects]
        addresses = [region.address for _, region in objects]
        sizes = [region.size_bytes for _, region in objects]
        statuses = await self._guard(lambda: native.batch_put_from(keys, addresses, sizes))
        if statuses is None:
            return dict.fromkeys(keys, PutOutcome.FAILED)
        self._note_statuses(statuses)
        words = {0: PutOutcome.STORED, STORE_FULL: PutOutcome.FULL}
        return {
            key: words.get(status, PutOutcome.FAILED)
            for key, status in zip(keys, statuses, strict=True)
        }

    async def get(self, objects: Sequence[tuple[str, Region]]) -> list[bool]:
        """Reads objects into registered memory; see `ObjectStore.get`."""
        if not objects or not await self._ready():
            return [False] * len(objects)
        native = self._native
        keys = [key for key, _ in objects]
        addresses = [region.address for _, region in objects]
        sizes = [region.size_bytes for _, region in objects]
        counts = await self._guard(lambda: native.batch_get_into(keys, addresses, sizes))
        if counts is None:
            return [False] * len(objects)
        self._note_statuses(counts)
        return [count == size for count, size in zip(counts, sizes, strict=True)]

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        """Says which keys can be read now; see `ObjectStore.exists`."""
        if not keys or not await self._ready():
            return [False] * len(keys)
        native = self._native
        found = await self._guard(lambda: native.batch_is_exist(list(keys)))
        if found is None:
            return [False] * len(keys)
        self._note_statuses(found)
        return [status == 1 for status in found]

    async def remove(self, keys: Sequence[str]) -> None:
        """Drops objects; see `ObjectStore.remove`."""
        if keys and await self._ready():
            native = self._native
            await self._guard(lambda: [native.remove(key, True) for key in keys])

    async def _guard(self, call: Callable[[], list[int]]) -> list[int] | None:
        try:
            return await self._gate.run(call)
        except TierUnavailable:
            return None

    def _note_statuses(self, statuses: Sequence[int]) -> None:
        if any(status in MASTER_LOST for status in statuses):
            self._trip()

    async def close(self) -> None:
        """Ends the connection; see `ObjectStore.close`."""
        native = self._native

        def last() -> None:
            if native is not None:
                with contextlib.suppress(RuntimeError):
                    native.close()

        await self._gate.close(last)
        self._open_until_s = float("inf")
