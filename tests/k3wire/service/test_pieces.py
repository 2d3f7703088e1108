"""Bytes that a process holds itself, read piece by piece over the bus."""

import asyncio
import hashlib
import os
import time
from typing import Any

import pytest

from k3wire import subjects
from k3wire.blobs.memory_store import MemoryBlobStore
from k3wire.bus.base import Headers
from k3wire.bus.memory import MemoryBus
from k3wire.errors import BlobLost, DeadlineExceeded, TierUnavailable
from k3wire.messages.base import PIECE_BYTES, BlobRef, PieceReply, PieceRequest
from k3wire.service.pieces import MAX_PIECES_AT_ONCE, PieceHolder, read_blob

SUBJECT = "k3.worker.gateway-1.piece"


def soon_ns(seconds: float = 5) -> int:
    return time.time_ns() + int(seconds * 1e9)


class Away(MemoryBlobStore):
    async def get(self, key: str) -> bytes | None:
        raise TierUnavailable("away")


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 20 * PIECE_BYTES + 7])
async def test_blobs_of_any_length_come_whole(size: int) -> None:
    bus, holder, data = MemoryBus(), PieceHolder(SUBJECT), os.urandom(size)
    await holder.serve(bus)
    blob = holder.hold(data, store_key="k")
    assert blob.digest == hashlib.sha256(data).digest()
    for store in (None, Away(), MemoryBlobStore()):
        assert await read_blob(bus, store, blob, soon_ns()) == data


async def test_the_store_is_asked_first_and_not_believed() -> None:
    bus, holder, store = MemoryBus(), PieceHolder(SUBJECT), MemoryBlobStore()
    await holder.serve(bus)
    blob = holder.hold(b"right", store_key="k")
    await store.put("k", b"wrong", ttl_s=60)
    assert await read_blob(bus, store, blob, soon_ns()) == b"right"
    await store.put("k", b"right", ttl_s=60)
    holder.release(blob.digest)
    assert await read_blob(bus, store, blob, soon_ns()) == b"right"


async def test_holders_are_counted() -> None:
    bus, holder = MemoryBus(), PieceHolder(SUBJECT)
    await holder.serve(bus)
    blob = holder.hold(b"data")
    holder.hold(b"data", digest=blob.digest)
    assert holder.size_bytes == 4
    holder.release(blob.digest)
    assert await read_blob(bus, None, blob, soon_ns()) == b"data"
    holder.release(blob.digest)
    holder.release(blob.digest)
    assert holder.size_bytes == 0
    with pytest.raises(BlobLost):
        await read_blob(bus, None, blob, soon_ns())


async def test_a_holder_that_is_gone_or_lies_means_lost() -> None:
    bus, data = MemoryBus(), b"x" * 100
    blob = BlobRef(digest=hashlib.sha256(data).digest(), size_bytes=100, holder=SUBJECT)
    with pytest.raises(BlobLost):
        await read_blob(bus, None, blob, soon_ns())
    with pytest.raises(BlobLost):
        await read_blob(bus, None, BlobRef(digest=b"d", size_bytes=1), soon_ns())
    for lie in (b"y" * 100, data[:-1], data + b"x"):

        async def answer(request: PieceRequest, headers: Headers, lie: bytes = lie) -> PieceReply:
            return PieceReply(data=lie)

        subscription = await bus.serve(SUBJECT, subjects.PIECE, answer)
        with pytest.raises(BlobLost):
            await read_blob(bus, None, blob, soon_ns())
        await subscription.drain()


async def test_pieces_are_read_beside_each_other_but_not_all_at_once() -> None:
    bus = MemoryBus()
    num_running = max_running = 0
    full = asyncio.Event()

    async def answer(request: PieceRequest, headers: Headers) -> PieceReply:
        nonlocal num_running, max_running
        num_running += 1
        max_running = max(max_running, num_running)
        if num_running == MAX_PIECES_AT_ONCE:
            full.set()
        await full.wait()
        num_running -= 1
        return PieceReply(data=bytes(request.size_bytes))

    await bus.serve(SUBJECT, subjects.PIECE, answer)
    data = bytes(40 * PIECE_BYTES)
    blob = BlobRef(digest=hashlib.sha256(data).digest(), size_bytes=len(data), holder=SUBJECT)
    assert await read_blob(bus, None, blob, soon_ns()) == data
    assert max_running == MAX_PIECES_AT_ONCE


async def test_one_failed_piece_ends_the_others() -> None:
    bus = MemoryBus()
    cancelled: list[Any] = []

    async def answer(request: PieceRequest, headers: Headers) -> PieceReply:
        if request.offset == 0:
            raise BlobLost("gone")
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(request.offset)
        raise AssertionError

    await bus.serve(SUBJECT, subjects.PIECE, answer)
    blob = BlobRef(digest=b"d", size_bytes=3 * PIECE_BYTES, holder=SUBJECT)
    with pytest.raises(BlobLost):
        await read_blob(bus, None, blob, soon_ns())


async def test_a_silent_holder_ends_with_the_deadline() -> None:
    bus = MemoryBus()

    async def answer(request: PieceRequest, headers: Headers) -> PieceReply:
        await asyncio.Event().wait()
        raise AssertionError

    await bus.serve(SUBJECT, subjects.PIECE, answer)
    blob = BlobRef(digest=b"d", size_bytes=1, holder=SUBJECT)
    with pytest.raises(DeadlineExceeded):
        await read_blob(bus, None, blob, soon_ns(0.05))
