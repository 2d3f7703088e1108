"""Fetchers as processes, over a real NATS server and a real Redis that stops, freezes and forgets."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.fetchers import start, until
from support.nats_server import nats_server
from support.picture_host import Held, PictureHost, answer, picture_host
from support.pictures import encode, gradient
from support.redis_server import free_port, redis_server

from k3wire import subjects
from k3wire.blobs.redis_store import RedisBlobStore
from k3wire.bus.nats_bus import NatsBus
from k3wire.errors import BlobLost, InvalidImageUrl
from k3wire.messages.fetch import ReadReply, ReadRequest, ResolveReply, ResolveRequest
from k3wire.messages.media import ImageRef
from k3wire.service.directory import Directory
from k3wire.service.pieces import read_blob

PICTURE = encode(gradient(400, 400), "PNG", compress_level=0)
START_S = 20.0


@dataclass
class Fleet:
    """Some fetchers, and a bus to ask them."""

    bus: NatsBus
    environment: dict[str, str]
    directory: Directory = field(default_factory=Directory)
    children: list[asyncio.subprocess.Process] = field(default_factory=list)

    async def add(self, number: int) -> None:
        for _ in range(number):
            self.children.append(
                await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "k3_fetcher", env=self.environment
                )
            )
        async with asyncio.timeout(START_S):
            while len(self.directory.ready("fetcher")) < number:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def resolve(self, url: str) -> ResolveReply:
        until_ns = time.time_ns() + 10 * 10**9
        request = ResolveRequest(request_id="r", url=url, deadline_unix_ns=until_ns)
        subject = subjects.shared(subjects.RESOLVE)
        return await self.bus.call(subject, subjects.RESOLVE, request, until_ns)

    async def read(self, image: ImageRef) -> ReadReply:
        until_ns = time.time_ns() + 10 * 10**9
        request = ReadRequest(request_id="r", image=image, deadline_unix_ns=until_ns)
        return await self.bus.call(subjects.shared(subjects.READ), subjects.READ, request, until_ns)

    async def until_stored(self, image: ImageRef) -> None:
        """Waits until the fetchers trust Redis again."""
        async with asyncio.timeout(10):
            while not (await self.read(image)).blob.store_key:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def fleet(
    folder: Path, redis_url: str, number: int = 1, **settings: str
) -> AsyncIterator[Fleet]:
    async with nats_server(folder) as url:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("K3_")}
        environment |= {
            "K3_NATS_URL": url, "K3_REDIS_URL": redis_url, "K3_GRACE_S": "5",
            "K3_FETCHER_ALLOWED_NETWORKS": "127.0.0.0/8", **settings,
        }  # fmt: skip
        found = Fleet(await NatsBus.connect(url, "test"), environment)
        following = await found.directory.follow(found.bus)
        try:
            await found.add(number)
            yield found
        finally:
            for child in found.children:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()
            await following.drain()
            await found.bus.close()


@pytest.fixture
async def host() -> AsyncIterator[PictureHost]:
    async with picture_host() as found:
        found.answers["/a.png"] = answer(PICTURE)
        yield found


async def test_fet_23_two_processes_and_redis_download_once(
    tmp_path: Path, host: PictureHost
) -> None:
    async with redis_server() as redis_url, fleet(tmp_path, redis_url, 2) as found:
        held = host.answers["/a.png"] = Held(answer(PICTURE))
        jobs = [start(found.resolve(host.url("/a.png"))) for _ in range(20)]
        await until(held.asked.is_set)
        held.go.set()
        replies = await asyncio.gather(*jobs)
        assert len({reply.report.worker_id for reply in replies}) == 2
        assert len({reply.image.content_key for reply in replies}) == 1
        assert host.num_connections == 1
        store = RedisBlobStore.open(redis_url)
        blob = (await found.read(replies[0].image)).blob
        assert await store.get(blob.store_key) == PICTURE
        await store.close()


async def test_redis_stopped_and_started_again_costs_downloads_and_no_errors(
    tmp_path: Path, host: PictureHost
) -> None:
    port = free_port()
    async with fleet(tmp_path, f"redis://127.0.0.1:{port}/0") as found:
        first = await found.resolve(host.url("/a.png"))
        second = await found.resolve(host.url("/a.png"))
        assert [first.report.outcome, second.report.outcome] == ["miss", "hit"]
        blob = (await found.read(first.image)).blob
        assert blob.store_key == ""
        until_ns = time.time_ns() + 10**10
        assert await read_blob(found.bus, None, blob, until_ns) == PICTURE
        async with redis_server(port) as url:
            store = RedisBlobStore.open(url)
            await found.until_stored(first.image)
            assert await read_blob(found.bus, store, blob, until_ns) == PICTURE
            await store.close()


async def test_a_frozen_redis_costs_less_than_a_download_may_take(
    tmp_path: Path, host: PictureHost
) -> None:
    port = free_port()
    async with redis_server(port) as url, fleet(tmp_path, url) as found:
        await found.resolve(host.url("/a.png"))
        pid = await redis_pid(port)
        os.kill(pid, signal.SIGSTOP)
        try:
            for path in ("/a.png", "/a.png?1", "/a.png?2", "/a.png?3"):
                # The deadline of each is the proof: ten seconds for four round trips.
                assert (await found.resolve(host.url(path))).image.size_bytes == len(PICTURE)
        finally:
            os.kill(pid, signal.SIGCONT)
        await found.until_stored((await found.resolve(host.url("/a.png"))).image)


async def redis_pid(port: int) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"INFO server\r\n")
    text = b""
    while b"process_id:" not in text or not text.rpartition(b"process_id:")[2].count(b"\n"):
        text += await reader.read(4096)
    writer.close()
    return int(text.partition(b"process_id:")[2].split()[0])


async def test_a_flushed_redis_is_filled_again(tmp_path: Path, host: PictureHost) -> None:
    async with redis_server() as url, fleet(tmp_path, url, K3_FETCHER_FRONT="0") as found:
        image = (await found.resolve(host.url("/a.png"))).image
        store = RedisBlobStore.open(url)
        key = (await found.read(image)).blob.store_key
        await store.delete(key)
        reply = await found.read(image)
        assert (reply.report.outcome, reply.blob.store_key) == ("miss", key)
        assert await store.get(key) == PICTURE
        await store.close()


async def test_a_process_that_is_killed_in_its_turn_lets_the_other_one_go_on(
    tmp_path: Path, host: PictureHost
) -> None:
    held = host.answers["/a.png"] = Held(answer(PICTURE))
    async with redis_server() as url, fleet(tmp_path, url, 1) as found:
        lost = start(found.resolve(host.url("/a.png")))
        await until(held.asked.is_set)
        found.children[0].kill()
        await found.children[0].wait()
        host.answers["/a.png"] = answer(PICTURE)
        found.directory.suspect(found.directory.ready("fetcher")[0].worker_id)
        await found.add(1)
        reply = await found.resolve(host.url("/a.png"))
        assert reply.report.outcome == "miss"
        lost.cancel()


async def test_a_drain_finishes_the_download_and_ends_with_status_zero(
    tmp_path: Path, host: PictureHost
) -> None:
    held = host.answers["/a.png"] = Held(answer(PICTURE))
    async with redis_server() as url, fleet(tmp_path, url) as found:
        running = start(found.resolve(host.url("/a.png")))
        await until(held.asked.is_set)
        found.children[0].terminate()
        async with asyncio.timeout(5):
            while found.directory.ready("fetcher"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        held.go.set()
        assert (await running).image.size_bytes == len(PICTURE)
        async with asyncio.timeout(10):
            assert await found.children[0].wait() == 0


async def test_private_places_are_refused_by_default_and_lost_bytes_are_lost(
    tmp_path: Path, host: PictureHost
) -> None:
    closed = {"K3_FETCHER_ALLOWED_NETWORKS": ""}
    async with redis_server() as url, fleet(tmp_path, url, **closed) as found:
        with pytest.raises(InvalidImageUrl):
            await found.resolve(host.url("/a.png"))
        gone = ImageRef(content_key=b"k" * 32, media_type="", width=1, height=1, size_bytes=1)
        with pytest.raises(BlobLost):
            await found.read(gone)
    assert host.num_connections == 0
