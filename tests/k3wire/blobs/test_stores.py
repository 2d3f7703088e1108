"""Blob stores: one set of promises, in memory and in a real Redis; then what Redis does to us."""

import asyncio
import os
import signal
import time
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.fetchers import start
from support.redis_server import free_port, redis_binary, redis_server, wait_for_pong

from k3wire.blobs import redis_store
from k3wire.blobs.base import BlobStore
from k3wire.blobs.memory_store import ENTRY_BYTES, MemoryBlobStore
from k3wire.blobs.redis_store import MAX_VALUE_BYTES, RedisBlobStore
from k3wire.errors import TierUnavailable


@pytest.fixture(params=["memory", "redis"])
async def store(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Any]:
    if request.param == "memory":
        yield MemoryBlobStore()
        return
    # What a slow answer does is tried below; here only a machine that stands still is slow.
    monkeypatch.setattr(redis_store, "OPERATION_TIMEOUT_S", 20.0)
    monkeypatch.setattr(redis_store, "CONNECT_TIMEOUT_S", 20.0)
    async with redis_server() as url:
        opened = RedisBlobStore.open(url)
        yield opened
        await opened.close()
        await opened.close()


async def test_what_is_put_is_got_until_it_is_deleted(store: BlobStore) -> None:
    assert await store.get("k") is None
    for data in (b"", b"\0\xff" * 3, bytes(2_000_000)):
        await store.put("k", data, ttl_s=60)
        assert await store.get("k") == data
    await store.delete("k")
    await store.delete("k")
    assert await store.get("k") is None


async def test_only_the_first_of_many_writers_wins(store: BlobStore) -> None:
    won = await asyncio.gather(*(store.put_if_absent("k", bytes([i]), ttl_s=60) for i in range(50)))
    assert sum(won) == 1
    assert await store.get("k") == bytes([won.index(True)])


async def test_values_end_and_are_renewed(store: BlobStore) -> None:
    await store.put("short", b"x", ttl_s=0.05)
    await store.put("long", b"x", ttl_s=0.05)
    assert await store.touch("long", ttl_s=60)
    async with asyncio.timeout(5):
        while await store.get("short") is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await store.get("long") == b"x"
    assert not await store.touch("short", ttl_s=60)
    assert await store.put_if_absent("short", b"y", ttl_s=60)


async def test_more_callers_than_connections_wait_their_turn(store: BlobStore) -> None:
    await asyncio.gather(*(store.put(str(i), b"x" * 1000, ttl_s=60) for i in range(500)))
    found = await asyncio.gather(*(store.get(str(i)) for i in range(500)))
    assert set(found) == {b"x" * 1000}


async def test_memory_forgets_what_was_used_longest_ago() -> None:
    store = MemoryBlobStore(3 * (10 + ENTRY_BYTES))
    for key in "abc":
        await store.put(key, b"x" * 10, ttl_s=60)
    await store.get("a")
    await store.put("d", b"x" * 10, ttl_s=60)
    assert [await store.get(key) is not None for key in "abcd"] == [True, False, True, True]


async def test_memory_takes_no_more_than_its_capacity_however_short_the_values() -> None:
    capacity_bytes = 1024 * 1024
    store = MemoryBlobStore(capacity_bytes)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        # Several times what fits, so that the table has grown and been rewritten.
        for number in range(8 * capacity_bytes // ENTRY_BYTES):
            key = f"l1:url:{number:064x}"
            await store.put(key, bytes(1 + number % 300), ttl_s=60)
        used_bytes = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert capacity_bytes / 2 < used_bytes <= capacity_bytes
    assert await store.get("l1:url:" + "0" * 64) is None


class PromptClient:
    """Answers a moment after it was asked."""

    async def get(self, key: str) -> bytes:
        await asyncio.sleep(0.001)
        return key.encode()


async def test_a_loop_that_was_held_up_does_not_blame_redis() -> None:
    store = RedisBlobStore(PromptClient())
    asking = start(store.get("k"))
    await asyncio.sleep(0)
    # The answer and the end of all patience fall into the same round of the loop.
    time.sleep(1.5 * redis_store.OPERATION_TIMEOUT_S)  # noqa: ASYNC251
    assert await asking == b"k"
    assert not store.is_open


async def test_a_redis_that_is_not_there_is_unavailable_and_soon_not_even_asked() -> None:
    store = RedisBlobStore.open(f"redis://127.0.0.1:{free_port()}/0")
    for _ in range(3):
        with pytest.raises(TierUnavailable):
            await store.get("k")
    assert store.is_open
    await store.close()


async def test_a_frozen_redis_costs_one_time_out_and_heals(
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = free_port()
    async with redis_server(port) as url:
        store = RedisBlobStore.open(url)
        await store.put("k", b"x", ttl_s=60)
        pid = await server_pid(port)
        os.kill(pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(5):
                # Two hundred callers in a row: the first waits, the others do not.
                for _ in range(200):
                    with pytest.raises(TierUnavailable):
                        await store.get("k")
        finally:
            os.kill(pid, signal.SIGCONT)
        await until_answers(store)
        assert await store.get("k") == b"x"
        await store.close()
    assert sum("redis unavailable" in record.message for record in caplog.records) == 1


async def test_a_redis_that_restarts_is_used_again() -> None:
    port = free_port()
    async with redis_server(port) as url:
        store = RedisBlobStore.open(url)
        await store.put("k", b"x", ttl_s=60)
    with pytest.raises(TierUnavailable):
        await store.get("k")
    async with redis_server(port):
        await until_answers(store)
        assert await store.get("k") is None
        await store.close()


async def test_a_full_redis_refuses_and_is_still_asked() -> None:
    arguments = ("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    async with redis_server(arguments=arguments) as url:
        store = RedisBlobStore.open(url)
        with pytest.raises(TierUnavailable):
            for index in range(5):
                await store.put(str(index), bytes(1_000_000), ttl_s=60)
        assert not store.is_open
        assert await store.get("nothing") is None
        await store.close()


@pytest.mark.parametrize(
    "reply", [":5\r\n", "*1\r\n+a\r\n", "#t\r\n", "%1\r\n+a\r\n+b\r\n", "!!\r\n"]
)
async def test_what_is_no_value_is_never_given_as_one(reply: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            if line.upper() == b"GET\r\n":
                writer.write(reply.encode())
            elif line.upper() in (b"HELLO\r\n", b"CLIENT\r\n"):
                writer.write(b"+OK\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        store = RedisBlobStore.open(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0")
        with pytest.raises(TierUnavailable):
            await store.get("k")
        await store.close()


async def test_values_that_are_too_long_are_not_sent() -> None:
    store = RedisBlobStore.open(f"redis://127.0.0.1:{free_port()}/0")
    for put in (store.put, store.put_if_absent):
        with pytest.raises(TierUnavailable):
            await put("k", bytes(MAX_VALUE_BYTES + 1), ttl_s=60)
    assert not store.is_open
    await store.close()


async def test_a_cancelled_reader_leaves_the_connection_usable() -> None:
    async with redis_server() as url:
        store = RedisBlobStore.open(url)
        await store.put("long", bytes(8_000_000), ttl_s=60)
        await store.put("short", b"x", ttl_s=60)
        for _ in range(20):
            reading = asyncio.get_running_loop().create_task(store.get("long"))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait([reading])
            assert await store.get("short") == b"x"
        await store.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://127.0.0.1:1,127.0.0.1:2/3?service=main",
        "redis+cluster://127.0.0.1:1",
        "rediss://127.0.0.1:1/0",
        "unix:///nowhere/redis.sock",
    ],
)
async def test_every_kind_of_address_opens_and_is_unavailable_where_nobody_listens(
    url: str,
) -> None:
    store = RedisBlobStore.open(url)
    async with asyncio.timeout(5):
        with pytest.raises(TierUnavailable):
            await store.get("k")
    await store.close()


async def command(port: int, *lines: str) -> None:
    """Sends commands and waits for as many OKs."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(5):
        for line in lines:
            writer.write(line.encode() + b"\r\n")
            assert await reader.readline() == b"+OK\r\n"
    writer.close()


async def test_a_cluster_keeps_values(tmp_path: Path) -> None:
    port = free_port()
    arguments = ("--cluster-enabled", "yes", "--cluster-config-file", str(tmp_path / "nodes"))
    async with redis_server(port, arguments=(*arguments, "--cluster-port", str(free_port()))):
        await command(port, "CLUSTER ADDSLOTSRANGE 0 16383")
        store = RedisBlobStore.open(f"redis+cluster://127.0.0.1:{port}")
        await until_answers(store)
        await store.put("k", b"x", ttl_s=60)
        assert await store.get("k") == b"x"
        assert not await store.put_if_absent("k", b"y", ttl_s=60)
        await store.close()


async def test_sentinels_say_where_the_master_is(tmp_path: Path) -> None:
    port, own = free_port(), free_port()
    config = tmp_path / "sentinel.conf"
    config.write_text(f"port {own}\nbind 127.0.0.1\nsentinel monitor pictures 127.0.0.1 {port} 1\n")
    async with redis_server(port):
        sentinel = await asyncio.create_subprocess_exec(
            redis_binary(), str(config), "--sentinel", stdout=asyncio.subprocess.DEVNULL
        )
        try:
            await wait_for_pong(own)
            url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{own}/0?service=pictures"
            store = RedisBlobStore.open(url)
            await until_answers(store)
            await store.put("k", b"x", ttl_s=60)
            assert await store.get("k") == b"x"
            await store.close()
        finally:
            sentinel.kill()
            await sentinel.wait()


async def server_pid(port: int) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"INFO server\r\n")
    text = b""
    while b"process_id:" not in text or b"\n" not in text.rpartition(b"process_id:")[2]:
        text += await reader.read(4096)
    writer.close()
    return int(text.partition(b"process_id:")[2].split()[0])


async def until_answers(store: RedisBlobStore) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                await store.get("nothing")
                return
            except TierUnavailable:
                await asyncio.sleep(0.02)
