"""The data plane within one process, for tests: real memory, real bounds, no sockets."""

import ctypes
import itertools
from collections.abc import Sequence

from k3core.transfer.base import PutOutcome, Region, Write, holds
from k3wire.errors import TierUnavailable


class MemoryFabric:
    """What joins the engines of one test."""

    def __init__(self) -> None:
        self._engines: dict[str, MemoryTransferEngine] = {}
        self._names = itertools.count(1)
        self.num_writes = 0

    def engine(self) -> "MemoryTransferEngine":
        """Makes an engine that can write to all others of this fabric."""
        session = f"memory:{next(self._names)}"
        engine = MemoryTransferEngine(session, self)
        self._engines[session] = engine
        return engine

    def find(self, session: str) -> "MemoryTransferEngine | None":
        """Finds an open engine."""
        return self._engines.get(session)

    def drop(self, session: str) -> None:
        """Forgets an engine, as when its process dies."""
        self._engines.pop(session, None)


class MemoryTransferEngine:
    """Copies with memmove; see `TransferEngine`."""

    def __init__(self, session: str, fabric: MemoryFabric) -> None:
        """Joins a fabric; use `MemoryFabric.engine`."""
        self._session = session
        self._fabric = fabric
        self._regions: list[Region] = []

    @property
    def session(self) -> str:
        """This engine's name."""
        return self._session

    async def register(self, region: Region) -> None:
        """Registers memory; see `TransferEngine.register`."""
        _add_region(self._regions, region)

    def holds(self, address: int, size_bytes: int) -> bool:
        """Whether a run lies within one registered region."""
        return holds(self._regions, address, size_bytes)

    async def write(self, session: str, writes: Sequence[Write]) -> None:
        """Copies into a peer; see `TransferEngine.write`."""
        peer = self._fabric.find(session)
        if peer is None or self._fabric.find(self._session) is not self:
            raise TierUnavailable("The other worker is gone")
        for write in writes:
            if not self.holds(write.source, write.size_bytes):
                raise TierUnavailable("The source is not registered")
            if not peer.holds(write.destination, write.size_bytes):
                raise TierUnavailable("The destination is not registered")
        for write in writes:
            ctypes.memmove(write.destination, write.source, write.size_bytes)
            self._fabric.num_writes += 1

    async def close(self) -> None:
        """Leaves the fabric; safe twice."""
        self._fabric.drop(self._session)


class MemoryObjectStore:
    """A byte-bounded pool that refuses when full; see `ObjectStore`."""

    def __init__(self, capacity_bytes: int = 256 * 1024 * 1024) -> None:
        """Starts empty."""
        self._capacity_bytes = capacity_bytes
        self._objects: dict[str, bytes] = {}
        self._regions: list[Region] = []

    async def register(self, region: Region) -> None:
        """Names memory; see `ObjectStore.register`."""
        _add_region(self._regions, region)

    def _check(self, objects: Sequence[tuple[str, Region]]) -> None:
        assert all(holds(self._regions, r.address, r.size_bytes) for _, r in objects), (
            "the memory of an object is not registered"
        )

    @property
    def size_bytes(self) -> int:
        """Bytes stored."""
        return sum(map(len, self._objects.values()))

    async def put(self, objects: Sequence[tuple[str, Region]]) -> list[PutOutcome]:
        """Stores copies; see `ObjectStore.put`."""
        self._check(objects)
        return [self._put(key, region) for key, region in objects]

    def _put(self, key: str, region: Region) -> PutOutcome:
        if key in self._objects:
            return PutOutcome.PRESENT
        if self.size_bytes + region.size_bytes > self._capacity_bytes:
            return PutOutcome.FULL
        self._objects[key] = ctypes.string_at(region.address, region.size_bytes)
        return PutOutcome.STORED

    async def get(self, objects: Sequence[tuple[str, Region]]) -> list[bool]:
        """Reads objects; see `ObjectStore.get`."""
        self._check(objects)
        return [self._get(key, region) for key, region in objects]

    def _get(self, key: str, region: Region) -> bool:
        data = self._objects.get(key)
        if data is None or len(data) != region.size_bytes:
            return False
        ctypes.memmove(region.address, data, len(data))
        return True

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        """Says which keys are there; see `ObjectStore.exists`."""
        return [key in self._objects for key in keys]

    async def remove(self, keys: Sequence[str]) -> None:
        """Drops objects; see `ObjectStore.remove`."""
        for key in keys:
            self._objects.pop(key, None)

    async def close(self) -> None:
        """Forgets everything; safe twice."""
        self._objects.clear()


def _add_region(regions: list[Region], region: Region) -> None:
    for other in regions:
        if region.address < other.address + other.size_bytes and (
            other.address < region.address + region.size_bytes
        ):
            raise TierUnavailable("The memory is registered already")
    regions.append(region)
