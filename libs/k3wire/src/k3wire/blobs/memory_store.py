"""Blobs within one process, for tests and for a stack without Redis."""

import asyncio
import time
from dataclasses import dataclass

from k3wire.blobs.byte_lru import ByteLru

ENTRY_BYTES = 400
"""What an entry takes beside its value: key, place in the table, objects; measured with keys of 71
characters, as ours are. A bound that counted values only would be overrun twice over by short ones."""


@dataclass(frozen=True, slots=True)
class _Entry:
    data: bytes
    end_s: float


class MemoryBlobStore:
    """A byte-bounded store; see `k3wire.blobs.base.BlobStore`."""

    def __init__(self, capacity_bytes: int = 256 * 1024 * 1024) -> None:
        """Starts empty.

        Args:
            capacity_bytes: memory it may take, entries' own part included.
        """
        self._entries: ByteLru[str, _Entry] = ByteLru(
            capacity_bytes, lambda e: len(e.data) + ENTRY_BYTES
        )

    def _live(self, key: str) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is not None and entry.end_s <= time.monotonic():
            self._entries.remove(key)
            return None
        return entry

    async def get(self, key: str) -> bytes | None:
        """Reads a value; see `BlobStore.get`."""
        await asyncio.sleep(0)
        entry = self._live(key)
        return entry.data if entry else None

    async def put(self, key: str, data: bytes, *, ttl_s: float) -> None:
        """Writes a value; see `BlobStore.put`."""
        await asyncio.sleep(0)
        self._entries.put(key, _Entry(bytes(data), time.monotonic() + ttl_s))

    async def put_if_absent(self, key: str, data: bytes, *, ttl_s: float) -> bool:
        """Writes unless the key exists; see `BlobStore.put_if_absent`."""
        await asyncio.sleep(0)
        if self._live(key) is not None:
            return False
        return self._entries.put(key, _Entry(bytes(data), time.monotonic() + ttl_s))

    async def delete(self, key: str) -> None:
        """Removes a key; see `BlobStore.delete`."""
        await asyncio.sleep(0)
        self._entries.remove(key)

    async def touch(self, key: str, *, ttl_s: float) -> bool:
        """Renews a key's life; see `BlobStore.touch`."""
        await asyncio.sleep(0)
        entry = self._live(key)
        if entry is None:
            return False
        return self._entries.put(key, _Entry(entry.data, time.monotonic() + ttl_s))
