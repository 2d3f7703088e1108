"""Bytes behind tier L1: verified, bounded, brought back, and handed out without Redis."""

import asyncio
import hashlib
from collections.abc import AsyncIterator

import msgspec
import pytest
from support.fetchers import AbsentStore, fetcher, start, until
from support.picture_host import Held, PictureHost, answer, picture_host
from support.pictures import encode, gradient

from k3_fetcher import records
from k3_fetcher.records import url_key
from k3wire.blobs.image_keys import image_bytes_key
from k3wire.blobs.memory_store import MemoryBlobStore
from k3wire.errors import (
    BlobLost,
    ErrorInfo,
    SlowDown,
)
from k3wire.messages.fetch import ResolveReply
from k3wire.messages.media import ImageRef

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


async def test_fet_25_wrong_bytes_in_the_store_are_a_miss(host: PictureHost) -> None:
    async with fetcher(front_bytes=0) as found:
        image = (await found.resolve(host.url("/a.png"))).image
        for wrong in (PICTURE[:-1], PICTURE[:-1] + b"x", b""):
            await found.store.put(image_bytes_key(image.content_key), wrong, ttl_s=60)
            reply = await found.read(image)
            assert reply.report.outcome == "miss"
            assert await found.store.get(reply.blob.store_key) == PICTURE


@pytest.mark.parametrize("wrong", [b"", b"\xff", b"\x80", msgspec.msgpack.encode({"a": 1})])
async def test_fet_25_a_record_that_cannot_be_read_is_a_miss(
    host: PictureHost, wrong: bytes
) -> None:
    async with fetcher() as found:
        await found.store.put(record_key(host), wrong, ttl_s=60)
        assert (await found.resolve(host.url("/a.png"))).report.outcome == "miss"
        assert (await found.resolve(host.url("/a.png"))).report.detail == "fresh"


async def test_fet_25_a_record_that_is_damaged_or_of_other_rules_is_a_miss(
    host: PictureHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fetcher() as found:
        image = (await found.resolve(host.url("/a.png"))).image
        key = record_key(host)
        kept = await found.store.get(key) or b""
        at = kept.index(image.content_key)
        for wrong in (
            kept[:-1],
            kept[:at] + b"x" + kept[at + 1 :],
            kept.replace(b"\xa6height\x1e", b"\xa6height\x1f"),
            kept[16:],
        ):
            assert wrong != kept
            await found.store.put(key, wrong, ttl_s=60)
            reply = await found.resolve(host.url("/a.png"))
            assert (reply.report.outcome, reply.image) == ("miss", image)
        monkeypatch.setattr(records, "SEAL_KEY", b"of another release")
        assert (await found.resolve(host.url("/a.png"))).report.outcome == "miss"


async def test_fet_24_a_refusal_of_a_newer_release_is_none(host: PictureHost) -> None:
    async with fetcher() as found:
        info = ErrorInfo(code="of_tomorrow", message="no")
        await found.handler.records.keep_refusal(record_key(host), info, 60)
        assert (await found.resolve(host.url("/a.png"))).image.width == 40


async def test_fet_25_the_front_is_bounded_by_bytes(host: PictureHost) -> None:
    pictures = [encode(gradient(20, 20 + i), "PNG") for i in range(6)]
    async with fetcher(front_bytes=2 * max(map(len, pictures)), store=AbsentStore()) as found:
        images: list[ImageRef] = []
        for index, picture in enumerate(pictures):
            host.answers[f"/{index}"] = answer(picture)
            images.append((await found.resolve(host.url(f"/{index}"))).image)
        hits = [(await found.read(image)).report.outcome for image in reversed(images)]
    assert hits == ["hit", "hit", "miss", "miss", "miss", "miss"]


async def test_without_redis_pictures_are_fetched_known_and_handed_out(host: PictureHost) -> None:
    async with fetcher(store=AbsentStore()) as found:
        first, second = [await found.resolve(host.url("/a.png")) for _ in range(2)]
        assert outcomes(first, second) == [("miss", "downloaded"), ("hit", "fresh")]
        blob = (await found.read(first.image)).blob
        assert (blob.store_key, blob.holder) == ("", "k3.test.pieces")
        assert found.pieces.size_bytes == len(PICTURE)
    assert host.num_connections == 1


async def test_bytes_that_l1_lost_come_back_once_for_everybody(host: PictureHost) -> None:
    store = AbsentStore(is_gone=False)
    async with fetcher(store=store, front_bytes=0) as found:
        image = (await found.resolve(host.url("/a.png"))).image
        store.inner = MemoryBlobStore()
        held = host.answers["/a.png"] = Held(answer(PICTURE))
        jobs = [start(found.read(image)) for _ in range(5)]
        await until(held.asked.is_set)
        held.go.set()
        replies = await asyncio.gather(*jobs)
        assert {reply.blob.store_key for reply in replies} == {image_bytes_key(image.content_key)}
        assert await store.get(image_bytes_key(image.content_key)) == PICTURE
        assert (await found.read(image)).report.outcome == "hit"
    assert host.num_asked("/a.png") == 2


async def test_an_address_with_other_bytes_now_refuses_and_is_known_anew(
    host: PictureHost,
) -> None:
    async with fetcher(front_bytes=0) as found:
        image = (await found.resolve(host.url("/a.png"))).image
        await found.store.delete(image_bytes_key(image.content_key))
        host.answers["/a.png"] = answer(OTHER)
        with pytest.raises(BlobLost):
            await found.read(image)
        again = await found.resolve(host.url("/a.png"))
        assert again.image.content_key == hashlib.sha256(OTHER).digest()


async def test_a_picture_without_an_address_that_is_gone_is_lost() -> None:
    async with fetcher() as found:
        image = ImageRef(content_key=b"k" * 32, media_type="", width=1, height=1, size_bytes=1)
        with pytest.raises(BlobLost):
            await found.read(image)


async def test_handing_out_is_bounded(host: PictureHost) -> None:
    async with fetcher(
        store=AbsentStore(), front_bytes=0, max_image_bytes=len(PICTURE) + 10
    ) as found:
        for index in range(2):
            host.answers[f"/{index}"] = answer(encode(gradient(40, 29 + index), "PNG"))
        images = [(await found.resolve(host.url(f"/{i}"))).image for i in range(2)]
        await found.read(images[0])
        await found.read(images[1])
        with pytest.raises(SlowDown):
            await found.read(images[0])
