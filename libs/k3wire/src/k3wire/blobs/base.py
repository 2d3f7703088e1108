"""Shared blobs: encoded images (tier L1) and long prompts, by key, with a time to live."""

from typing import Protocol


class BlobStore(Protocol):
    """A shared store of bytes; losing any entry at any time is allowed.

    Every method is bounded by the store's own time-out and raises `TierUnavailable` when the
    store is away, slow or full; callers then work without it.
    """

    async def get(self, key: str) -> bytes | None:
        """Reads a value, or None where there is none."""
        ...

    async def put(self, key: str, data: bytes, *, ttl_s: float) -> None:
        """Writes a value that lives for at most `ttl_s` seconds."""
        ...

    async def put_if_absent(self, key: str, data: bytes, *, ttl_s: float) -> bool:
        """Writes unless the key exists; says whether it wrote."""
        ...

    async def delete(self, key: str) -> None:
        """Removes a key; a missing one is fine."""
        ...

    async def touch(self, key: str, *, ttl_s: float) -> bool:
        """Renews a key's life; says whether it was there."""
        ...
