"""Tier L1: what is known of an image URL, and its bytes; in Redis, with a front in this process.

Keys: `l1:url:…` (tenant and URL) -> record; `l1:bytes:…` (content key) -> bytes. Redis away means
that nothing is found and nothing is kept but what the front holds.
"""

import hashlib
import time

import msgspec

from k3wire.blobs.base import BlobStore
from k3wire.blobs.byte_lru import ByteLru
from k3wire.errors import TierUnavailable

RECORD_LIFE_S = 86400.0


class UrlRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What was found at a URL.

    Attributes:
        content_key: SHA-256 of the bytes.
        media_type: sniffed.
        width: as seen.
        height: as seen.
        size_bytes: of the encoded image.
        fresh_until_unix_s: no question is needed before this; counted from validation.
        etag: to ask whether it changed.
        last_modified: likewise.
    """

    content_key: bytes
    media_type: str
    width: int
    height: int
    size_bytes: int
    fresh_until_unix_s: float
    etag: str = ""
    last_modified: str = ""

    @property
    def is_fresh(self) -> bool:
        """Whether it may be used without asking."""
        return time.time() < self.fresh_until_unix_s

    @property
    def validators(self) -> dict[str, str]:
        """Headers of a conditional request; none if the host gave nothing to ask by."""
        found: dict[str, str] = {}
        if self.etag:
            found["If-None-Match"] = self.etag
        if self.last_modified:
            found["If-Modified-Since"] = self.last_modified
        return found


def url_key(url: str, tenant: str) -> str:
    """L1's key of a URL; tenants that do not share have other keys."""
    digest = hashlib.sha256(f"{len(tenant)}:{tenant}{url}".encode()).hexdigest()
    return f"l1:url:{digest}"


def bytes_key(content_key: bytes) -> str:
    """L1's key of an image's bytes."""
    return f"l1:bytes:{content_key.hex()}"


class ImageRecords:
    """L1 as the fetcher uses it."""

    def __init__(self, store: BlobStore, front_bytes: int, bytes_ttl_s: float) -> None:
        """Takes the store.

        Args:
            store: Redis.
            front_bytes: bytes kept in this process.
            bytes_ttl_s: how long the store keeps an image's bytes.
        """
        self._store = store
        self._front: ByteLru[bytes, bytes] = ByteLru(front_bytes, len)
        self._bytes_ttl_s = bytes_ttl_s

    async def find(self, key: str) -> UrlRecord | None:
        """Reads a record; None where there is none, or the store is away."""
        try:
            data = await self._store.get(key)
            return msgspec.msgpack.decode(data, type=UrlRecord) if data else None
        except (TierUnavailable, msgspec.DecodeError):
            return None

    async def keep(self, key: str, record: UrlRecord) -> None:
        """Writes a record, if the store is there."""
        try:
            await self._store.put(key, msgspec.msgpack.encode(record), ttl_s=RECORD_LIFE_S)
        except TierUnavailable:
            return

    async def keep_bytes(self, content_key: bytes, data: bytes) -> bool:
        """Keeps an image's bytes; says whether the store has them."""
        self._front.put(content_key, data)
        try:
            await self._store.put(bytes_key(content_key), data, ttl_s=self._bytes_ttl_s)
        except TierUnavailable:
            return False
        return True

    async def read_bytes(self, content_key: bytes) -> bytes | None:
        """Reads an image's bytes from the front or the store."""
        data = self._front.get(content_key)
        if data is not None:
            return data
        try:
            return await self._store.get(bytes_key(content_key))
        except TierUnavailable:
            return None

    async def lock(self, key: str, ttl_s: float) -> bool:
        """Tries to be the one process that downloads a URL; true also while the store is away."""
        try:
            return await self._store.put_if_absent(f"{key}:lock", b"1", ttl_s=ttl_s)
        except TierUnavailable:
            return True

    async def unlock(self, key: str) -> None:
        """Lets others download again."""
        try:
            await self._store.delete(f"{key}:lock")
        except TierUnavailable:
            return
