"""Bytes that a process holds itself and serves over the bus, piece by piece.

For what is too long for a message and must not depend on a store being there: prompts of a
hundred thousand tokens, images of data URLs, image bytes while Redis is away. The digest is
checked by the reader.
"""

import asyncio
import hashlib
from dataclasses import dataclass

from k3wire import subjects
from k3wire.blobs.base import BlobStore
from k3wire.bus.base import Bus, Headers, Subscription
from k3wire.errors import BlobLost, NoResponders, TierUnavailable
from k3wire.messages.base import PIECE_BYTES, BlobRef, PieceReply, PieceRequest

MAX_PIECES_AT_ONCE = 8


@dataclass(slots=True)
class _Held:
    data: bytes
    num_holders: int


class PieceHolder:
    """Blobs of this process, by digest, counted by holder."""

    def __init__(self, subject: str) -> None:
        """Starts empty.

        Args:
            subject: where the pieces are served; stands in every `BlobRef` made here.
        """
        self.subject = subject
        self._held: dict[bytes, _Held] = {}

    async def serve(self, bus: Bus) -> Subscription:
        """Begins to answer piece requests."""
        return await bus.serve(self.subject, subjects.PIECE, self._answer)

    @property
    def size_bytes(self) -> int:
        """Bytes held now."""
        return sum(len(held.data) for held in self._held.values())

    def hold(self, data: bytes, *, digest: bytes = b"", store_key: str = "") -> BlobRef:
        """Holds bytes until `release`; holding the same ones again counts.

        Args:
            data: kept by reference.
            digest: SHA-256 of them if already known.
            store_key: where else they are.
        """
        digest = digest or hashlib.sha256(data).digest()
        held = self._held.setdefault(digest, _Held(data, 0))
        held.num_holders += 1
        return BlobRef(
            digest=digest, size_bytes=len(data), store_key=store_key, holder=self.subject
        )

    def release(self, digest: bytes) -> None:
        """Ends one holding; an unknown digest is fine."""
        held = self._held.get(digest)
        if held is not None:
            held.num_holders -= 1
            if held.num_holders <= 0:
                del self._held[digest]

    async def _answer(self, request: PieceRequest, headers: Headers) -> PieceReply:
        held = self._held.get(request.digest)
        if held is None:
            raise BlobLost("The bytes are no longer held here")
        size = min(request.size_bytes, PIECE_BYTES)
        return PieceReply(data=held.data[request.offset : request.offset + size])


async def read_blob(
    bus: Bus, store: BlobStore | None, blob: BlobRef, deadline_unix_ns: int
) -> bytes:
    """Reads the bytes of a reference: from the store if there, else from their holder.

    Raises:
        BlobLost: nobody has them, or what came has another digest.
        DeadlineExceeded: no time was left.
    """
    if store is not None and blob.store_key:
        try:
            data = await store.get(blob.store_key)
        except TierUnavailable:
            data = None
        if data is not None and _fits(data, blob):
            return data
    if not blob.holder:
        raise BlobLost("The bytes are in no store and nobody holds them")
    data = await _read_pieces(bus, blob, deadline_unix_ns)
    if not _fits(data, blob):
        raise BlobLost("The bytes that came are not those that were asked for")
    return data


def _fits(data: bytes, blob: BlobRef) -> bool:
    return len(data) == blob.size_bytes and hashlib.sha256(data).digest() == blob.digest


async def _read_pieces(bus: Bus, blob: BlobRef, deadline_unix_ns: int) -> bytes:
    slots = asyncio.Semaphore(MAX_PIECES_AT_ONCE)

    async def read(offset: int) -> bytes:
        request = PieceRequest(
            digest=blob.digest,
            offset=offset,
            size_bytes=PIECE_BYTES,
            deadline_unix_ns=deadline_unix_ns,
        )
        async with slots:
            reply = await bus.call(blob.holder, subjects.PIECE, request, deadline_unix_ns)
        return reply.data

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(read(at)) for at in range(0, blob.size_bytes, PIECE_BYTES)]
    except BaseExceptionGroup as failures:
        # One piece missing is the blob missing; its siblings were cancelled with it.
        first = failures.exceptions[0]
        if isinstance(first, NoResponders):
            raise BlobLost("Whoever held the bytes is gone") from first
        raise first from None
    return b"".join(task.result() for task in tasks)
