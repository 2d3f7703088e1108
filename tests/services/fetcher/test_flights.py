"""One download for everybody who asks, and what is believed of one that failed."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.fetchers import LateStore, failure, fetcher, start, until
from support.picture_host import Held, PictureHost, answer, picture_host
from support.pictures import encode, gradient

from k3_fetcher.records import url_key
from k3wire.blobs.memory_store import MemoryBlobStore
from k3wire.blobs.turns import LOCK_LIFE_S, lock_key
from k3wire.errors import (
    Cancelled,
    FailedToDownloadImage,
    ImageParseError,
    InvalidImageUrl,
)
from k3wire.messages.control import Cancel
from k3wire.messages.fetch import ResolveReply

PICTURE = encode(gradient(40, 30), "PNG")
OTHER = encode(gradient(30, 40), "PNG")


@pytest.fixture
async def host() -> AsyncIterator[PictureHost]:
    async with picture_host() as found:
        found.answers["/a.png"] = answer(PICTURE)
        yield found


def outcomes(*replies: ResolveReply) -> list[tuple[str, str]]:
    return [(reply.report.outcome, reply.report.detail) for reply in replies]


def record_key(host: PictureHost, path: str = "/a.png", tenant: str = "") -> str:
    return url_key(host.url(path), tenant)


async def test_fet_23_many_waiters_share_one_connection_and_keep_their_own_paths(
    host: PictureHost,
) -> None:
    held = host.answers["/a.png"] = Held(answer(status=404))
    async with fetcher() as found:
        jobs = [
            start(failure(found, host.url("/a.png"), param=f"messages[{i}]")) for i in range(10)
        ]
        await until(held.asked.is_set)
        held.go.set()
        errors = await asyncio.gather(*jobs)
    assert host.num_connections == 1
    assert [error.param for error in errors] == [f"messages[{i}]" for i in range(10)]
    assert len({id(error) for error in errors}) == 10
    assert {type(error) for error in errors} == {FailedToDownloadImage}


async def test_fet_23_a_cancel_leaves_the_flight_to_the_others(host: PictureHost) -> None:
    held = host.answers["/a.png"] = Held(answer(PICTURE))
    async with fetcher() as found:
        leaving = start(failure(found, host.url("/a.png"), request_id="a"))
        await until(held.asked.is_set)
        staying = start(found.resolve(host.url("/a.png"), request_id="b"))
        await until(lambda: found.handler.load(0).num_running == 2)
        found.handler.cancel(Cancel(request_id="a"))
        found.handler.cancel(Cancel(request_id="unknown"))
        assert isinstance(await leaving, Cancelled)
        held.go.set()
        assert (await staying).image.width == 40
    assert host.num_connections == 1


async def test_fet_23_the_last_cancel_stops_the_flight_and_is_not_remembered(
    host: PictureHost,
) -> None:
    held = host.answers["/a.png"] = Held(answer(PICTURE))
    async with fetcher() as found:
        jobs = [start(failure(found, host.url("/a.png"), request_id=name)) for name in "ab"]
        await until(held.asked.is_set)
        for name in "ab":
            found.handler.cancel(Cancel(request_id=name))
        assert [type(error) for error in await asyncio.gather(*jobs)] == [Cancelled, Cancelled]
        await until(lambda: host.num_open == 0)
        assert found.handler.load(0).num_running == 0
        host.answers["/a.png"] = answer(PICTURE)
        assert (await found.resolve(host.url("/a.png"))).report.outcome == "miss"


async def test_fet_23_two_processes_with_one_store_download_once(host: PictureHost) -> None:
    held = host.answers["/a.png"] = Held(answer(PICTURE))
    store = MemoryBlobStore()
    async with fetcher(store=store) as one, fetcher(store=store) as two:
        first = start(one.resolve(host.url("/a.png")))
        await until(held.asked.is_set)
        second = start(two.resolve(host.url("/a.png")))
        await until(lambda: two.handler.load(0).num_running)
        held.go.set()
        replies = await asyncio.gather(first, second)
    assert outcomes(*replies) == [
        ("miss", "downloaded"), ("hit", "another process downloaded it"),
    ]  # fmt: skip
    assert host.num_connections == 1


async def test_fet_23_what_one_process_validated_another_takes_although_it_is_stale(
    host: PictureHost,
) -> None:
    held = host.answers["/a.png"] = Held(answer(PICTURE, Cache_Control="no-cache"))
    store = MemoryBlobStore()
    async with fetcher(store=store) as one, fetcher(store=store) as two:
        jobs = [start(f.resolve(host.url("/a.png"))) for f in (one, two)]
        await until(held.asked.is_set)
        await until(lambda: one.handler.load(0).num_running and two.handler.load(0).num_running)
        # Both have begun before the answer leaves.
        held.go.set()
        replies = await asyncio.gather(*jobs)
    assert sorted(outcomes(*replies)) == [
        ("hit", "another process downloaded it"), ("miss", "downloaded"),
    ]  # fmt: skip


async def test_fet_23_who_looked_before_another_had_ended_and_got_his_turn_after_it_looks_again(
    host: PictureHost,
) -> None:
    late = LateStore()
    async with fetcher(store=late.inner) as one, fetcher(store=late) as two:
        job = start(two.resolve(host.url("/a.png")))
        await until(late.asked.is_set)
        first = await one.resolve(host.url("/a.png"))
        late.go.set()
        assert outcomes(first, await job) == [
            ("miss", "downloaded"), ("hit", "another process downloaded it"),
        ]  # fmt: skip
    assert host.num_connections == 1


async def test_fet_24_a_passing_failure_that_was_waited_for_is_not_remembered_for_longer(
    host: PictureHost,
) -> None:
    late = LateStore()
    host.answers["/down"] = answer(status=503)
    settings = {"max_retries": 0}
    async with fetcher(store=late.inner, **settings) as one, fetcher(store=late, **settings) as two:
        job = start(failure(two, host.url("/down")))
        await until(late.asked.is_set)
        await failure(one, host.url("/down"))
        late.go.set()
        assert isinstance(await job, FailedToDownloadImage)
        assert late.puts == []
    assert host.num_asked("/down") == 1


async def test_fet_08_a_fresh_record_that_is_not_permitted_any_more_is_none_for_who_looks_again(
    host: PictureHost,
) -> None:
    store = MemoryBlobStore()
    async with fetcher(store=store) as open_one:
        await open_one.resolve(host.url("/a.png"))
    async with fetcher(store=store, allowed_networks=()) as closed:
        error = await failure(closed, host.url("/a.png"))
        assert isinstance(error, InvalidImageUrl)


async def test_fet_23_a_process_that_died_in_its_turn_holds_others_up_only_briefly(
    host: PictureHost,
) -> None:
    store = MemoryBlobStore()
    await store.put_if_absent(lock_key(record_key(host)), b"1", ttl_s=LOCK_LIFE_S / 10)
    async with fetcher(store=store) as found:
        assert (await found.resolve(host.url("/a.png"))).report.outcome == "miss"


async def test_fet_24_refusals_are_remembered_and_shared(host: PictureHost) -> None:
    store = MemoryBlobStore()
    host.answers["/bad.png"] = answer(PICTURE[:20])
    async with fetcher(store=store) as one, fetcher(store=store) as two:
        for path, kind in (("/missing", FailedToDownloadImage), ("/bad.png", ImageParseError)):
            for found in (one, two):
                error = await failure(found, host.url(path), param="p")
                assert (type(error), error.param) == (kind, "p")
            assert host.num_asked(path) == 1


async def test_fet_24_a_failure_that_may_pass_is_forgotten_soon(host: PictureHost) -> None:
    lives: dict[str, float] = {}

    class Noting(MemoryBlobStore):
        async def put(self, key: str, data: bytes, *, ttl_s: float) -> None:
            lives[key] = ttl_s
            await super().put(key, data, ttl_s=ttl_s)

    host.answers |= {"/500": answer(status=500), "/404": answer(status=404)}
    async with fetcher(store=Noting(), max_retries=0) as found:
        for path in ("/500", "/404"):
            await failure(found, host.url(path))
    assert 0 < lives[record_key(host, "/500") + ":no"] <= 2
    assert 10 <= lives[record_key(host, "/404") + ":no"] <= 30
