"""What is answered for a URL, what is remembered of it, and for how long."""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.fetchers import Names, failure, fetcher
from support.picture_host import Asked, PictureHost, answer, picture_host
from support.pictures import encode, exif_block, gradient

from k3_fetcher.records import url_key
from k3wire.blobs.image_keys import image_bytes_key
from k3wire.blobs.memory_store import MemoryBlobStore
from k3wire.errors import (
    ImageError,
    InvalidImageUrl,
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


async def test_a_picture_is_described_as_it_is_seen(host: PictureHost) -> None:
    turned = encode(gradient(40, 30), "JPEG", exif=b"Exif\0\0" + exif_block(6))
    host.answers["/b.jpg"] = answer(turned)
    async with fetcher() as found:
        image = (await found.resolve(host.url("/b.jpg?x=1#f"))).image
    assert image == ImageRef(
        content_key=hashlib.sha256(turned).digest(),
        media_type="image/jpeg",
        width=30,
        height=40,
        size_bytes=len(turned),
        url=host.url("/b.jpg?x=1"),
    )


async def test_a_hit_says_what_it_saved_and_where_the_bytes_are(host: PictureHost) -> None:
    async with fetcher() as found:
        first, second = [await found.resolve(host.url("/a.png")) for _ in range(2)]
        assert outcomes(first, second) == [("miss", "downloaded"), ("hit", "fresh")]
        assert first.report.saved_ns == 0
        assert 0 < second.report.saved_ns < first.report.duration_ns
        assert (second.report.num_items, second.report.num_hits) == (1, 1)
        assert await found.store.get(image_bytes_key(second.image.content_key)) == PICTURE
    assert host.num_connections == 1


async def test_fet_08_lists_are_asked_at_every_hit(host: PictureHost) -> None:
    names = Names({n: [["127.0.0.1"]] for n in ("good.example", "inner.example")})
    host.answers["/r.png"] = answer(status=302, Location=host.url("/a.png", "inner.example"))
    store = MemoryBlobStore()
    async with fetcher(names, store) as found:
        await found.resolve(host.url("/r.png", "good.example"))
        assert (await found.resolve(host.url("/r.png", "good.example"))).report.outcome == "hit"
    for denied in ("good.example", "inner.example"):
        async with fetcher(names, store, denied_domains=(denied,)) as found:
            error = await failure(found, host.url("/r.png", "good.example"))
            assert isinstance(error, InvalidImageUrl)
            await store.delete(url_key(host.url("/r.png", "good.example"), "") + ":no")
    assert host.num_asked("/a.png") == 1


async def test_fet_08_networks_are_asked_at_every_hit(host: PictureHost) -> None:
    store = MemoryBlobStore()
    async with fetcher(store=store) as found:
        await found.resolve(host.url("/a.png"))
    async with fetcher(store=store, allowed_networks=()) as found:
        assert isinstance(await failure(found, host.url("/a.png")), InvalidImageUrl)


async def test_fet_08_bytes_are_not_read_for_a_denied_host(host: PictureHost) -> None:
    store = MemoryBlobStore()
    async with fetcher(store=store) as found:
        image = (await found.resolve(host.url("/a.png"))).image
    async with fetcher(store=store, denied_domains=("127.0.0.1",)) as found:
        with pytest.raises(InvalidImageUrl):
            await found.read(image)


@pytest.mark.parametrize("limit", ["max_downloads_per_host", "max_downloads"])
async def test_fet_16_downloads_are_bounded_by_host_and_in_all(
    host: PictureHost, limit: str
) -> None:
    gate = asyncio.Event()

    async def wait(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if host.num_open == 3:
            gate.set()
        await gate.wait()
        writer.write(answer(PICTURE))

    for index in range(12):
        host.answers[f"/{index}"] = wait
    settings: dict[str, Any] = {limit: 3}
    async with fetcher(**settings) as found:
        replies = await asyncio.gather(*(found.resolve(host.url(f"/{i}")) for i in range(12)))
    assert len(replies) == 12
    assert host.max_open == 3


async def test_fet_17_logs_hold_no_query_and_no_user(
    host: PictureHost, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with fetcher() as found:
        await found.resolve(host.url("/a.png?sig=SECRET"))
        await failure(found, host.url("/missing.png?sig=SECRET"))
        await failure(found, "http://user:SECRET@a.example/SECRET")
        await failure(found, "http://user?SECRET@a.example/SECRET")
        await failure(found, "data:image/png;base64,SECRET")
    lines = [record for record in caplog.records if record.name == "k3_fetcher.handler"]
    assert len(lines) == 5
    assert [vars(record)["outcome"] for record in lines[:2]] == [
        "downloaded", "failed_to_download_image",
    ]  # fmt: skip
    assert "SECRET" not in "".join(str(vars(record)) for record in caplog.records)


async def test_fet_20_spellings_share_and_queries_and_tenants_do_not(host: PictureHost) -> None:
    async with fetcher() as found:
        for url in (
            host.url("/a.png"), host.url("/a.png#x"), host.url("/a.png").replace("http", "HTTP"),
            host.url("/a.png?v=1"), host.url("/a.png?v=2"),
        ):  # fmt: skip
            await found.resolve(url)
        await found.resolve(host.url("/a.png"), tenant="a")
        hit = await found.resolve(host.url("/a.png"), tenant="a")
        assert (hit.report.outcome, hit.image.tenant) == ("hit", "a")
    paths = ["/a.png", "/a.png?v=1", "/a.png?v=2", "/a.png"]
    assert [asked.path for asked in host.asked] == paths
    assert url_key("b", "a") != url_key("ab", "")


async def test_fet_21_stale_is_asked_about_and_unchanged_is_renewed(host: PictureHost) -> None:
    async def serve(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if asked.headers.get("if-none-match") == 'W/"1"':
            writer.write(answer(status=304, ETag='W/"1"', Cache_Control="max-age=60"))
        else:
            modified = "Sat, 29 Nov 2025 00:00:00 GMT"
            writer.write(
                answer(PICTURE, ETag='W/"1"', Cache_Control="max-age=0", Last_Modified=modified)
            )

    host.answers["/a.png"] = serve
    async with fetcher() as found:
        replies = [await found.resolve(host.url("/a.png")) for _ in range(3)]
    assert outcomes(*replies) == [("miss", "downloaded"), ("hit", "revalidated"), ("hit", "fresh")]
    assert replies[0].image == replies[1].image == replies[2].image
    assert host.asked[1].headers["if-modified-since"] == "Sat, 29 Nov 2025 00:00:00 GMT"
    assert len(host.asked) == 2


async def test_fet_21_changed_bytes_get_a_new_name(host: PictureHost) -> None:
    host.answers["/a.png"] = answer(PICTURE, ETag="1", Cache_Control="max-age=0")
    async with fetcher() as found:
        first = await found.resolve(host.url("/a.png"))
        host.answers["/a.png"] = answer(OTHER, ETag="2", Cache_Control="max-age=60")
        second = await found.resolve(host.url("/a.png"))
    assert first.image.content_key == hashlib.sha256(PICTURE).digest()
    assert second.image.content_key == hashlib.sha256(OTHER).digest()
    assert (second.image.width, second.image.height) == (30, 40)


async def test_fet_21_a_hit_does_not_make_a_record_live_longer(host: PictureHost) -> None:
    async with fetcher() as found:
        await found.resolve(host.url("/a.png"))
        before = await found.store.get(record_key(host))
        for _ in range(3):
            await found.resolve(host.url("/a.png"))
        assert await found.store.get(record_key(host)) == before


async def test_fet_21_what_must_not_be_stored_is_asked_for_each_time(host: PictureHost) -> None:
    host.answers["/a.png"] = answer(PICTURE, Cache_Control="no-store", ETag="1")
    async with fetcher() as found:
        for _ in range(2):
            await found.resolve(host.url("/a.png"))
        assert await found.store.get(record_key(host)) is None
    assert len(host.asked) == 2
    assert "if-none-match" not in host.asked[1].headers


async def test_without_the_tier_every_request_downloads_and_the_bytes_still_get_through(
    host: PictureHost,
) -> None:
    host.answers["/a.png"] = answer(PICTURE, ETag="1", Cache_Control="max-age=60")
    async with fetcher() as warm:
        await warm.resolve(host.url("/a.png"))
        # A record that others left is not gone by either.
        async with fetcher(store=warm.store, keeps_images=False) as found:
            replies = [await found.resolve(host.url("/a.png")) for _ in range(2)]
            assert outcomes(*replies) == [("miss", "downloaded")] * 2
            assert len(host.asked) == 3
            assert (await found.read(replies[0].image)).report.outcome == "hit"


@pytest.mark.parametrize("url", ["data:image/png;base64,AAAA", "DATA:,x"])
async def test_fet_26_data_urls_are_not_the_fetchers(url: str) -> None:
    async with fetcher() as found:
        assert isinstance(await failure(found, url), ImageError)
