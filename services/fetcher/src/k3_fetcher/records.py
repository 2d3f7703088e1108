"""Tier L1: what is known of an image URL, and its bytes; in Redis, with a front in this process.

Keys: `l1:url:…` (tenant and URL) -> record or refusal, behind a seal; `l1:bytes:…` (content key) ->
bytes. What is damaged, cut off or of another release's rules is as good as none. While Redis is
away this process goes by what it has seen itself.
"""

import asyncio
import contextlib
import hashlib
import time

import msgspec

from k3_fetcher.gate import Hop
from k3text.images.keys import content_key
from k3text.images.versions import RULES
from k3wire.blobs.base import BlobStore
from k3wire.blobs.byte_lru import ByteLru
from k3wire.blobs.image_keys import image_bytes_key
from k3wire.blobs.memory_store import MemoryBlobStore
from k3wire.blobs.turns import Turn, take_turn
from k3wire.errors import ErrorInfo, TierUnavailable, from_info

RECORD_LIFE_S = 86400.0
UNSTORABLE_LIFE_S = 60.0
"""How long bytes that must not be stored wait for the request that needs them."""

SPARE_SHARE = 8
MIN_SPARE_BYTES = 1024 * 1024
"""Records seen by this process, for while Redis is away, take a part of what images take in front:
an eighth, and no less than this; a record is about two thirds of a kilobyte."""

SEAL_BYTES = 16
SEAL_KEY = f"k3 l1 record v1, image rules {RULES}".encode()
"""Sizes in records are by the rules that read the header; other rules must read it anew."""

LOOP_BYTES = 256 * 1024
"""Bytes that are hashed on the event loop; about a fifth of a millisecond."""


class UrlRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What was found at a URL.

    Attributes:
        content_key: SHA-256 of the bytes.
        media_type: sniffed.
        width: as seen.
        height: as seen.
        size_bytes: of the encoded image.
        validated_unix_s: when the host last said so.
        fresh_until_unix_s: no question is needed before this; counted from validation.
        etag: to ask whether it changed.
        last_modified: likewise.
        hops: hosts that were asked; judged again at every hit.
        cost_ns: what the download took; a hit saves it.
    """

    content_key: bytes
    media_type: str
    width: int
    height: int
    size_bytes: int
    validated_unix_s: float = 0.0
    fresh_until_unix_s: float
    etag: str = ""
    last_modified: str = ""
    hops: tuple[Hop, ...] = ()
    cost_ns: int = 0

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


def _seal(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=SEAL_BYTES, key=SEAL_KEY).digest() + body


def _unseal(data: bytes | None) -> bytes | None:
    body = data[SEAL_BYTES:] if data else b""
    return body if data == _seal(body) else None


async def hash_bytes(data: bytes) -> bytes:
    """Names encoded bytes, off the loop if they are long."""
    if len(data) <= LOOP_BYTES:
        return content_key(data)
    return await asyncio.to_thread(content_key, data)


class ImageRecords:
    """L1 as the fetcher uses it."""

    def __init__(self, store: BlobStore, front_bytes: int, bytes_ttl_s: float) -> None:
        """Takes the store.

        Args:
            store: Redis.
            front_bytes: images kept in this process; what is known of addresses comes on top, see
                `SPARE_SHARE`.
            bytes_ttl_s: how long the store keeps an image's bytes.
        """
        self._store = store
        self._spare = MemoryBlobStore(max(MIN_SPARE_BYTES, front_bytes // SPARE_SHARE))
        self._front: ByteLru[bytes, bytes] = ByteLru(front_bytes, len)
        self._bytes_ttl_s = bytes_ttl_s

    async def _get(self, key: str) -> bytes | None:
        try:
            return await self._store.get(key)
        except TierUnavailable:
            return await self._spare.get(key)

    async def _put(self, key: str, data: bytes, ttl_s: float) -> None:
        await self._spare.put(key, data, ttl_s=ttl_s)
        with contextlib.suppress(TierUnavailable):
            await self._store.put(key, data, ttl_s=ttl_s)

    async def find(self, key: str) -> UrlRecord | None:
        """Reads a record, or None where there is none that can be read."""
        data = _unseal(await self._get(key))
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.msgpack.decode(data, type=UrlRecord) if data else None
        return None

    async def keep(self, key: str, record: UrlRecord) -> None:
        """Writes a record."""
        await self._put(key, _seal(msgspec.msgpack.encode(record)), RECORD_LIFE_S)

    async def forget(self, key: str) -> None:
        """Removes a record."""
        await self._spare.delete(key)
        with contextlib.suppress(TierUnavailable):
            await self._store.delete(key)

    async def find_refusal(self, key: str) -> ErrorInfo | None:
        """Reads why a URL gave no image a moment ago, or None."""
        data = _unseal(await self._get(f"{key}:no"))
        with contextlib.suppress(msgspec.DecodeError):
            info = msgspec.msgpack.decode(data, type=ErrorInfo) if data else None
            # A code of a newer release says nothing here.
            return info if info is not None and from_info(info).code == info.code else None
        return None

    async def keep_refusal(self, key: str, info: ErrorInfo, life_s: float) -> None:
        """Remembers why a URL gave no image."""
        await self._put(f"{key}:no", _seal(msgspec.msgpack.encode(info)), life_s)

    async def keep_bytes(self, key: bytes, data: bytes, *, is_storable: bool = True) -> bool:
        """Keeps an image's bytes; says whether the store has them.

        Args:
            key: their content key.
            data: the encoded image.
            is_storable: whether its host lets it be kept for longer than it is needed.
        """
        if is_storable:
            self._front.put(key, data)
        ttl_s = self._bytes_ttl_s if is_storable else UNSTORABLE_LIFE_S
        try:
            await self._store.put(image_bytes_key(key), data, ttl_s=ttl_s)
        except TierUnavailable:
            return False
        return True

    def read_front(self, key: bytes) -> bytes | None:
        """Reads an image's bytes from this process."""
        return self._front.get(key)

    async def read_store(self, key: bytes) -> bytes | None:
        """Reads an image's bytes from the store; wrong ones are as good as none."""
        try:
            data = await self._store.get(image_bytes_key(key))
        except TierUnavailable:
            return None
        if data is None or await hash_bytes(data) != key:
            return None
        self._front.put(key, data)
        return data

    async def take_turn(self, key: str, give_up_s: float) -> Turn:
        """Waits to be the one process that downloads a URL.

        Args:
            key: of the URL.
            give_up_s: longest wait; after it the download happens beside the other one.
        """
        return await take_turn(self._store, key, give_up_s)
