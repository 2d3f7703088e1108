"""Where the encoded bytes of an image come from: Redis, the fetcher, or whoever holds them.

Whatever comes is believed only if its SHA-256 is the content key.
"""

import asyncio
import logging
from dataclasses import dataclass

from k3text.images.keys import content_key
from k3wire import subjects
from k3wire.blobs.base import BlobStore
from k3wire.blobs.image_keys import image_bytes_key
from k3wire.bus.base import Bus
from k3wire.errors import BlobLost, TierUnavailable
from k3wire.messages.base import BlobRef, StageReport
from k3wire.messages.fetch import ReadRequest
from k3wire.messages.media import ImageRef
from k3wire.service.patience import Peers, call_patiently
from k3wire.service.pieces import read_blob

logger = logging.getLogger(__name__)

LOOP_BYTES = 256 * 1024
"""Bytes that are hashed on the event loop; about a fifth of a millisecond."""


@dataclass(frozen=True, slots=True)
class FoundBytes:
    """An image's bytes.

    Attributes:
        data: checked against the content key.
        reports: the fetcher's, if it was asked.
    """

    data: bytes
    reports: tuple[StageReport, ...] = ()


@dataclass(frozen=True, slots=True)
class ByteSource:
    """Finds bytes.

    Attributes:
        bus: to the fetcher and to holders.
        store: tier L1, None where there is none.
        fetchers: the loss of one ends a wait for it.
    """

    bus: Bus
    store: BlobStore | None
    fetchers: Peers | None = None

    async def read(self, request_id: str, image: ImageRef, deadline_unix_ns: int) -> FoundBytes:
        """Finds an image's bytes, the cheapest place first.

        Raises:
            BlobLost: nobody has them any more.
            K3Error: what the fetcher answered.
        """
        data = await self._read_store(image)
        if data is not None:
            return FoundBytes(data)
        if image.holder:
            blob = BlobRef(
                digest=image.content_key, size_bytes=image.size_bytes, holder=image.holder
            )
            return FoundBytes(await read_blob(self.bus, None, blob, deadline_unix_ns))
        if image.url:
            return await self._ask_fetcher(request_id, image, deadline_unix_ns)
        raise BlobLost("The image is in no store and nobody holds it")

    async def _read_store(self, image: ImageRef) -> bytes | None:
        if self.store is None:
            return None
        try:
            data = await self.store.get(image_bytes_key(image.content_key))
        except TierUnavailable:
            return None
        if data is None or await _digest(data) == image.content_key:
            return data
        logger.warning("wrong bytes in tier L1", extra={"size_bytes": len(data)})
        return None

    async def _ask_fetcher(
        self, request_id: str, image: ImageRef, deadline_unix_ns: int
    ) -> FoundBytes:
        request = ReadRequest(request_id=request_id, image=image, deadline_unix_ns=deadline_unix_ns)
        subject = subjects.shared(subjects.READ)
        reply = await call_patiently(
            self.bus, subject, subjects.READ, request, deadline_unix_ns, self.fetchers
        )
        if reply.blob.digest != image.content_key:
            raise BlobLost("The image's address now answers with other bytes")
        data = await read_blob(self.bus, self.store, reply.blob, deadline_unix_ns)
        return FoundBytes(data, (reply.report,))


async def _digest(data: bytes) -> bytes:
    if len(data) <= LOOP_BYTES:
        return content_key(data)
    return await asyncio.to_thread(content_key, data)
