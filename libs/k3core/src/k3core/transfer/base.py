"""The data plane as workers see it: writes between registered buffers, and a shared store.

Memory is spoken of by address and length, whoever owns it (torch, numpy, an anonymous mapping), so
that this room needs none of them. Whoever registers memory keeps it alive until `close`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Write:
    """One contiguous write from this process to another.

    Attributes:
        source: address of the first byte here.
        destination: address of the first byte there.
        size_bytes: length.
    """

    source: int
    destination: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Region:
    """A run of memory of this process.

    Attributes:
        address: of its first byte.
        size_bytes: length.
    """

    address: int
    size_bytes: int


def holds(regions: Iterable[Region], address: int, size_bytes: int) -> bool:
    """Whether a run of memory lies within one of some regions."""
    return any(
        region.address <= address and address + size_bytes <= region.address + region.size_bytes
        for region in regions
    )


class TransferEngine(Protocol):
    """Writes into memory that a peer registered. Implementations: `mooncake`, `memory`."""

    @property
    def session(self) -> str:
        """This process's name for its peers, `host:port`."""
        ...

    async def register(self, region: Region) -> None:
        """Lets peers write here, and this process write from here.

        Raises:
            TierUnavailable: the engine refused; overlapping regions are refused.
        """
        ...

    async def write(self, session: str, writes: Sequence[Write]) -> None:
        """Writes spans into a peer and returns when all of them are applied there.

        A cancelled or late call does not stop the bytes: the sources must stay untouched until
        this coroutine has really ended, which it does, even when cancelled, only after the native
        writes have.

        Raises:
            TierUnavailable: the peer is gone, refused, or did not acknowledge in time.
        """
        ...

    async def close(self) -> None:
        """Waits for running writes and closes; safe twice; later calls raise TierUnavailable."""
        ...


class PutOutcome(Enum):
    """What became of one put.

    Attributes:
        STORED: it can be read now.
        PRESENT: it could be read before.
        FULL: there is no room now; later there may be.
        FAILED: the store is away, or somebody else is half-way through the same key.
    """

    STORED = "stored"
    PRESENT = "present"
    FULL = "full"
    FAILED = "failed"


class ObjectStore(Protocol):
    """A shared pool of objects by key. Implementations: `mooncake`, `memory`.

    Keys are content-addressed: equal keys mean equal bytes, and whoever comes second loses
    nothing. An object may vanish at any time.
    """

    async def register(self, region: Region) -> None:
        """Names memory that objects are read into and written from, before it is used.

        Raises:
            TierUnavailable: the store refused; overlapping regions are refused.
        """
        ...

    async def put(self, objects: Sequence[tuple[str, Region]]) -> list[PutOutcome]:
        """Stores copies of registered memory; never raises for a full or absent store.

        A key that is `STORED` or `PRESENT` could be read a moment ago. A cancelled call ends only
        when the store has stopped reading the memory.
        """
        ...

    async def get(self, objects: Sequence[tuple[str, Region]]) -> list[bool]:
        """Reads objects of exactly the regions' lengths into registered memory.

        A cancelled call ends only when the store has stopped writing the memory.

        Returns:
            for each, whether its whole region was filled; otherwise its bytes are undefined.
        """
        ...

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        """Says which keys can be read now; an absent store has none."""
        ...

    async def remove(self, keys: Sequence[str]) -> None:
        """Drops objects; missing ones are fine."""
        ...

    async def close(self) -> None:
        """Ends the connection; safe twice; later calls find nothing."""
        ...
