"""Mooncake behind our protocols: Transfer Engine and Store, over TCP or RDMA.

The native library has habits that this adapter keeps from everybody else. A method called on a
closed or unopened handle kills the interpreter: every call passes a gate. Set-up holds the
interpreter's lock: it happens once, at the start, and the master's port is probed before. Waits are
busy loops: at most two native calls run at once. A call cannot be cancelled: ours ends only when
the native one has, so memory is never reused under it. A put of an existing or half-written key
says it succeeded: presence is checked afterwards. A dead master costs seconds a call: a circuit
opens after the first failure and closes when its port answers. A dead owner's objects still exist
for a while: those that could not be read are taken for absent meanwhile.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from k3core.transfer.base import PutOutcome, Region, Write, holds
from k3core.transfer.batches import index_batches, write_batches
from k3core.transfer.mooncake_codes import (
    MASTER_CODES,
    UNREADABLE_CODES,
    Code,
    describe,
    put_outcome,
)
from k3core.transfer.mooncake_library import NotInstalled, load_native
from k3core.transfer.native_gate import NativeGate
from k3core.transfer.quarantine import Quarantine
from k3wire.errors import TierUnavailable

logger = logging.getLogger(__name__)

OPEN_S = 2.0
"""How long a master, or a peer, that did not answer is left alone."""

SETUP_OPEN_S = 60.0
"""How long a master is left alone that accepts connections and does not answer: each try to set up
holds the whole interpreter for as long as a call may take."""

SLOW_FAILURE_S = 1.0
"""A failure that took so long was a time-out: the next call would take as long."""

UNREADABLE_S = 5.0
"""How long an object that could not be read is taken for absent; the master's `client_ttl`."""

MAX_UNREADABLE = 16384
MAX_SUSPECTS = 1024
PROBE_TIMEOUT_S = 0.5

LOCAL_BUFFER_BYTES = 16 * 1024 * 1024
"""Smallest the library takes; all our transfers are from registered memory and do not use it."""


class MooncakeTransferEngine:
    """Mooncake's Transfer Engine; see `TransferEngine`."""

    def __init__(self, native: Any, session: str) -> None:
        """Wraps an initialised engine; use `open`."""
        # Any: the native module has no annotations.
        self._native = native
        self._session = session
        self._gate = NativeGate("mooncake-transfer")
        self._regions: list[Region] = []
        self._suspects = Quarantine(OPEN_S, MAX_SUSPECTS)

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
            native = load_native("engine").TransferEngine()
            return native, native.initialize(host, "P2PHANDSHAKE", protocol, devices)

        try:
            native, status = await asyncio.to_thread(start)
        except NotInstalled as error:
            raise TierUnavailable(str(error)) from error
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

    async def write(self, session: str, writes: Sequence[Write]) -> None:
        """Writes spans into a peer; see `TransferEngine.write`."""
        # TCP takes unregistered memory silently and RDMA does not; the mistake must show on both.
        if not all(holds(self._regions, write.source, write.size_bytes) for write in writes):
            raise TierUnavailable("The source of a write is not registered")
        for batch in write_batches(writes):
            await self._write(session, batch)

    async def _write(self, session: str, writes: Sequence[Write]) -> None:
        sources = [write.source for write in writes]
        destinations = [write.destination for write in writes]
        sizes = [write.size_bytes for write in writes]

        def call() -> tuple[int, float]:
            if session in self._suspects:
                return -1, 0.0
            started_s = time.monotonic()
            status = self._native.batch_transfer_sync_write(session, sources, destinations, sizes)
            return status, time.monotonic() - started_s

        status, took_s = await self._gate.run(call, lane=session)
        if status == 0:
            self._suspects.discard(session)
            return
        if took_s > SLOW_FAILURE_S:
            # It timed out; those that wait behind it would each hold a thread as long.
            self._suspects.add(session)
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
        """Prepares; `connect`, or the first use, connects: an absent master stops nobody.

        Args:
            master: `host:port` of the master.
            host: address that peers reach this process by.
            protocol: `tcp` or `rdma`.
        """
        self._master = master
        self._host = host
        self._protocol = protocol
        # Any: the native module has no annotations.
        self._native: Any = None
        self._gate = NativeGate("mooncake-store")
        self._setup_lock = asyncio.Lock()
        self._has_tripped = False
        self._open_until_s = 0.0
        self._unreadable = Quarantine(UNREADABLE_S, MAX_UNREADABLE)
        self._regions: list[Region] = []

    @property
    def is_open(self) -> bool:
        """Whether the circuit is open: the master failed a moment ago and is left alone."""
        return time.monotonic() < self._open_until_s

    async def connect(self) -> bool:
        """Connects now, which holds the interpreter for some tenths of a second; says if it did.

        To be called before a worker says that it is ready. If it fails, a later use tries again.
        """
        return await self._is_ready()

    async def register(self, region: Region) -> None:
        """Names memory; see `ObjectStore.register`."""
        async with self._setup_lock:
            if self._native is not None:
                native = self._native
                status = await self._gate.run(
                    lambda: native.register_buffer(region.address, region.size_bytes)
                )
                if status != 0:
                    raise TierUnavailable(f"Memory could not be registered (code {status})")
            self._regions.append(region)

    def _trip(self, reason: str, for_s: float = OPEN_S) -> None:
        if not self._has_tripped:
            logger.warning(
                "mooncake store unavailable", extra={"master": self._master, "reason": reason}
            )
        self._has_tripped = True
        self._open_until_s = time.monotonic() + for_s

    async def _is_ready(self) -> bool:
        if self.is_open:
            return False
        if self._native is not None and not self._has_tripped:
            return True
        # One asks whether the master is back, the others wait for what it finds.
        async with self._setup_lock:
            if self.is_open:
                return False
            if self._native is None or self._has_tripped:
                try:
                    await self._gate.run(self._connect)
                except TierUnavailable as error:
                    self._trip(error.message, error.retry_after_s or OPEN_S)
                    return False
                except NotInstalled as error:
                    self._trip(str(error), float("inf"))
                    return False
                self._has_tripped = False
        return True

    def _connect(self) -> None:
        host, _, port = self._master.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=PROBE_TIMEOUT_S):
                pass
        except OSError as error:
            raise TierUnavailable("Mooncake's master does not answer") from error
        if self._native is not None:
            return
        native = load_native("store").MooncakeDistributedStore()
        status = native.setup(
            self._host, "P2PHANDSHAKE", 0, LOCAL_BUFFER_BYTES, self._protocol, "", self._master
        )
        if status != 0:
            raise TierUnavailable(
                f"Mooncake's store does not start (code {status})", retry_after_s=SETUP_OPEN_S
            )
        for region in self._regions:
            native.register_buffer(region.address, region.size_bytes)
        self._native = native

    async def put(self, objects: Sequence[tuple[str, Region]]) -> list[PutOutcome]:
        """Stores copies of registered memory; see `ObjectStore.put`."""
        wanted = self._checked(objects)
        outcomes = dict.fromkeys(wanted, PutOutcome.FAILED)
        asked = [key for key in wanted if key not in self._unreadable]
        present = await self._present(asked)
        outcomes |= dict.fromkeys(present, PutOutcome.PRESENT)
        missing = [(key, wanted[key]) for key in asked if key not in present]
        for batch in index_batches([region.size_bytes for _, region in missing]):
            outcomes |= await self._put_batch([missing[index] for index in batch])
        # A put says that it succeeded when another writer is half-way through the same key, or
        # died there.
        stored = [key for key, outcome in outcomes.items() if outcome is PutOutcome.STORED]
        readable = await self._present(stored)
        for key in stored:
            if key not in readable:
                outcomes[key] = PutOutcome.FAILED
        return [outcomes[key] for key, _ in objects]

    async def _put_batch(self, batch: Sequence[tuple[str, Region]]) -> dict[str, PutOutcome]:
        keys, addresses, sizes = _columns(batch)
        statuses = await self._call(
            lambda: self._native.batch_put_from(keys, addresses, sizes), len(keys)
        )
        self._log_failures("put", [status for status in statuses if status != 0])
        return {key: put_outcome(status) for key, status in zip(keys, statuses, strict=True)}

    async def get(self, objects: Sequence[tuple[str, Region]]) -> list[bool]:
        """Reads objects into registered memory; see `ObjectStore.get`."""
        self._checked(objects)
        filled = [False] * len(objects)
        asked = [place for place, (key, _) in enumerate(objects) if key not in self._unreadable]
        for batch in index_batches([objects[place][1].size_bytes for place in asked]):
            places = [asked[index] for index in batch]
            counts = await self._get_batch([objects[place] for place in places])
            for place, count in zip(places, counts, strict=True):
                key, region = objects[place]
                filled[place] = count == region.size_bytes
                if count in UNREADABLE_CODES:
                    self._unreadable.add(key)
        return filled

    async def _get_batch(self, batch: Sequence[tuple[str, Region]]) -> list[int]:
        keys, addresses, sizes = _columns(batch)
        counts = await self._call(
            lambda: self._native.batch_get_into(keys, addresses, sizes), len(keys)
        )
        self._log_failures("get", [count for count in counts if count < 0])
        return counts

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        """Says which keys can be read now; see `ObjectStore.exists`."""
        present = await self._present([key for key in keys if key not in self._unreadable])
        return [key in present for key in keys]

    async def _present(self, keys: list[str]) -> set[str]:
        if not keys:
            return set()
        found = await self._call(lambda: self._native.batch_is_exist(keys), len(keys))
        return {key for key, status in zip(keys, found, strict=True) if status == 1}

    async def remove(self, keys: Sequence[str]) -> None:
        """Drops objects; see `ObjectStore.remove`."""
        if keys:
            await self._call(lambda: [self._native.remove(key, True) for key in keys], len(keys))

    async def _call(self, call: Callable[[], list[int]], num_keys: int) -> list[int]:
        """Runs a batch call if the store is there; gives one status a key."""
        away = [int(Code.MASTER_LOST)] * num_keys
        try:
            if not await self._is_ready():
                return away
            # Again in its turn: the one before it may have found the master gone.
            statuses, took_s = await self._gate.run(
                lambda: (away, 0.0) if self.is_open else _timed(call)
            )
        except TierUnavailable:
            return away
        failures = [status for status in statuses if status < 0]
        if took_s > 0 and any(status in MASTER_CODES for status in failures):
            self._trip("the master does not answer")
        elif took_s > SLOW_FAILURE_S and any(status in UNREADABLE_CODES for status in failures):
            self._trip("an owner of objects does not answer")
        return statuses

    def _checked(self, objects: Sequence[tuple[str, Region]]) -> dict[str, Region]:
        # TCP takes unregistered memory silently and RDMA does not; the mistake must show on both.
        assert all(holds(self._regions, r.address, r.size_bytes) for _, r in objects), (
            "the memory of an object is not registered"
        )
        return dict(objects)

    def _log_failures(self, what: str, statuses: Sequence[int]) -> None:
        if statuses and not self._has_tripped:
            names = sorted({describe(status) for status in statuses})
            logger.debug(
                "mooncake store refused",
                extra={"what": what, "num": len(statuses), "codes": ",".join(names)},
            )

    async def close(self) -> None:
        """Ends the connection; see `ObjectStore.close`."""

        def last() -> None:
            if self._native is not None:
                with contextlib.suppress(RuntimeError):
                    self._native.close()

        await self._gate.close(last)
        self._has_tripped = True
        self._open_until_s = float("inf")


def _timed(call: Callable[[], list[int]]) -> tuple[list[int], float]:
    started_s = time.monotonic()
    statuses = call()
    return statuses, time.monotonic() - started_s


def _columns(objects: Sequence[tuple[str, Region]]) -> tuple[list[str], list[int], list[int]]:
    return (
        [key for key, _ in objects],
        [region.address for _, region in objects],
        [region.size_bytes for _, region in objects],
    )
