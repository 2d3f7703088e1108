"""Tier L3: embeddings by key, in this process's registered memory and in the shared store.

Always true: an entry lies in one piece, behind it the CRC-32 of its bytes; one that is being
written, read or shared is referred to and not put out; memory whose entry is gone is free again.
"""

import asyncio
import zlib
from dataclasses import dataclass

from k3_encoder.room import Room, run_to_end
from k3core.engine.host_memory import Span
from k3core.scheduler.embeddings import EmbeddingCache
from k3core.transfer.base import ObjectStore, PutOutcome, Region
from k3wire.blobs.base import BlobStore
from k3wire.blobs.turns import Turn, take_turn

CHECKSUM_BYTES = 4
LAST_POLL_S = 0.25
"""Longest pause between two looks at another encoder's turn; a request may wait for hundreds."""

LOOP_BYTES = 256 * 1024
"""Longest span that is summed on the loop; about a tenth of a millisecond."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Embeddings that lie in L3's memory.

    Attributes:
        span: where, checksum included.
        size_bytes: of the embeddings.
        checksum: `zlib.crc32` of them.
    """

    span: Span
    size_bytes: int
    checksum: int


class Shelf:
    """Both levels of the tier.

    Attributes:
        room: the memory of the level in this process.
    """

    def __init__(
        self,
        room: Room,
        store: ObjectStore | None,
        name_prefix: str,
        turns: BlobStore | None = None,
    ) -> None:
        """Starts empty.

        Args:
            room: registered with the data plane, and with the store.
            store: the shared level, or None.
            name_prefix: of its objects; tells checkpoints apart.
            turns: where encoders agree who makes an entry, or None.
        """
        self.room = room
        self._store = store
        self._turns = turns
        # Whether others could find what this process shared last.
        self._is_sharing = True
        self._name_prefix = name_prefix
        self._cache = EmbeddingCache(room.memory.size_bytes)
        self._entries: dict[bytes, Stored] = {}
        self._shares: set[asyncio.Task[None]] = set()

    @property
    def num_entries(self) -> int:
        """Images held."""
        return len(self._entries)

    def can_hold(self, key: bytes, size_bytes: int) -> bool:
        """Whether `hold` would find room, by the books."""
        return self._cache.can_acquire(key, size_bytes + CHECKSUM_BYTES)

    def hold(self, key: bytes, size_bytes: int) -> None:
        """Refers to an entry, there or to come, putting out idle ones if it needs room."""
        self._cache.acquire(key, size_bytes + CHECKSUM_BYTES)
        self._sweep()

    def let_go(self, key: bytes) -> None:
        """Ends one reference."""
        self._cache.release(key)

    def find(self, key: bytes) -> Stored | None:
        """Looks in this process."""
        return self._entries.get(key)

    def allocate(self, size_bytes: int) -> Span | None:
        """Takes memory for a new entry; None where free memory lies in too many pieces."""
        return self.room.try_allocate(size_bytes + CHECKSUM_BYTES)

    def view(self, span: Span, size_bytes: int) -> memoryview:
        """The bytes of an entry, without its checksum."""
        return self.room.memory.view(span.offset, size_bytes)

    async def read_shared(self, key: bytes, span: Span, size_bytes: int) -> Stored | None:
        """Fills an entry's memory from the shared level; None if it has no whole copy."""
        if self._store is None:
            return None
        (is_found,) = await self._store.get([self._object(key, span, size_bytes)])
        if not is_found:
            return None
        checksum = await checksum_of(self.view(span, size_bytes))
        written = self.room.memory.view(span.offset + size_bytes, CHECKSUM_BYTES)
        if int.from_bytes(written, "big") != checksum:
            return None
        return Stored(span, size_bytes, checksum)

    async def seal(self, span: Span, size_bytes: int) -> Stored:
        """Puts the checksum behind freshly written embeddings."""
        checksum = await checksum_of(self.view(span, size_bytes))
        written = self.room.memory.view(span.offset + size_bytes, CHECKSUM_BYTES)
        written[:] = checksum.to_bytes(CHECKSUM_BYTES, "big")
        return Stored(span, size_bytes, checksum)

    def keep(self, key: bytes, stored: Stored) -> bool:
        """Takes a sealed entry over; False, with its memory free again, if nobody refers to it.

        Work that was given up may end all the same, after another took its place.
        """
        is_wanted = self._cache.holds(key, stored.size_bytes + CHECKSUM_BYTES)
        if not is_wanted or key in self._entries:
            self.room.free(stored.span)
            return False
        self._entries[key] = stored
        return True

    async def take_turn(self, key: bytes, give_up_s: float) -> Turn:
        """Waits to be the one encoder that makes an entry, where others would find it.

        The caller ends the turn or leaves it to `share`. Where nothing is shared, or what was
        shared last got nowhere, nobody waits for anybody.

        Args:
            key: of the entry.
            give_up_s: longest wait; after it the entry is made beside the other encoder's.
        """
        if self._turns is None or self._store is None or not self._is_sharing:
            return Turn(None, self._name(key), has_waited=False)
        return await take_turn(self._turns, self._name(key), give_up_s, LAST_POLL_S)

    def share(self, key: bytes, turn: Turn) -> None:
        """Copies an entry that is held to the shared level in the background, then ends the turn."""
        stored, store = self._entries[key], self._store
        if store is None:
            return
        # The entry must stay as it is until the store has copied it.
        self.hold(key, stored.size_bytes)

        async def copy() -> None:
            try:
                (outcome,) = await store.put([self._object(key, stored.span, stored.size_bytes)])
                self._is_sharing = outcome in (PutOutcome.STORED, PutOutcome.PRESENT)
            finally:
                self.let_go(key)
                await turn.end()

        task = asyncio.get_running_loop().create_task(copy())
        self._shares.add(task)
        task.add_done_callback(self._shares.discard)

    async def settle(self) -> None:
        """Waits until nothing is being shared any more."""
        while self._shares:
            await asyncio.wait(set(self._shares))

    def _object(self, key: bytes, span: Span, size_bytes: int) -> tuple[str, Region]:
        address = self.room.memory.address + span.offset
        return self._name(key), Region(address, size_bytes + CHECKSUM_BYTES)

    def _name(self, key: bytes) -> str:
        return f"{self._name_prefix}{key.hex()}"

    def _sweep(self) -> None:
        for key in self._cache.drain_dropped():
            stored = self._entries.pop(key, None)
            if stored is not None:
                self.room.free(stored.span)


async def checksum_of(view: memoryview) -> int:
    """Sums bytes, off the loop where there are many; the bytes must stay until it has ended."""
    if len(view) <= LOOP_BYTES:
        return zlib.crc32(view)
    return await run_to_end(lambda: zlib.crc32(view))
