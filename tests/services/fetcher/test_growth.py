"""What a fetcher remembers is bounded: once its tables are full, a new picture leaves nothing."""

import gc
import logging
import sys
from collections.abc import Generator

import pytest
from support.fetchers import Fetcher, fetcher
from support.picture_host import PictureHost, answer, picture_host
from support.pictures import encode, gradient

from k3_fetcher import records
from k3wire.blobs.memory_store import MemoryBlobStore

TABLE_BYTES = 20_000
"""Of each table: some 20 records or pictures."""

NUM_WARM = 300
"""More than the 256 addresses that the HTTP client's own caches keep."""

NUM_JUDGED = 300
PICTURE = encode(gradient(40, 30), "PNG")


@pytest.fixture
def no_collector() -> Generator[None, None, None]:
    # What is logged is kept for the report, and how much that is depends on the tests before.
    logging.disable()
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    logging.disable(logging.NOTSET)


async def resolve(found: Fetcher, host: PictureHost, numbers: range) -> None:
    for number in numbers:
        # As bytes, after which the connection is kept: the next one is not counted as a request's.
        body = PICTURE + str(number).encode()
        host.answers["/a.png"] = answer(body, Cache_Control="max-age=60")
        reply = await found.resolve(host.url(f"/a.png?{number}"), request_id=f"r{number}")
        assert reply.report.detail == "downloaded"
        # Every other one is asked for again, so that hits are judged too.
        if number % 2:
            again = await found.resolve(host.url(f"/a.png?{number}"), request_id=f"s{number}")
            assert again.report.detail == "fresh"
        host.asked.clear()


async def test_new_pictures_leave_neither_objects_nor_cycles(
    monkeypatch: pytest.MonkeyPatch, no_collector: None
) -> None:
    monkeypatch.setattr(records, "MIN_SPARE_BYTES", TABLE_BYTES)
    store = MemoryBlobStore(TABLE_BYTES)
    async with (
        picture_host() as host,
        fetcher(store=store, front_bytes=TABLE_BYTES) as found,
    ):
        await resolve(found, host, range(NUM_WARM))
        gc.collect()
        num_blocks = sys.getallocatedblocks()
        await resolve(found, host, range(NUM_WARM, NUM_WARM + NUM_JUDGED))
        num_unreachable = gc.collect()
        num_left = sys.getallocatedblocks() - num_blocks
    assert num_unreachable < NUM_JUDGED
    # An entry that nobody removes is a key, a value and what they are made of: more than two blocks
    # a picture. The event loop keeps up to a hundred cancelled timers, which is less.
    assert num_left < 2 * NUM_JUDGED
