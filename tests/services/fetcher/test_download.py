"""Transfers: pinned, bounded in bytes and time, retried only where that may help."""

import asyncio
import gzip
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.fetchers import Names, fetcher
from support.picture_host import Asked, PictureHost, answer, picture_host, raw
from support.pictures import encode, gradient

from k3wire.errors import (
    EmptyImageFile,
    FailedToDownloadImage,
    ImageError,
    ImageFileTooLarge,
    ImageParseError,
    InvalidImageUrl,
    UnsupportedImageMediaType,
)

PICTURE = encode(gradient(40, 30), "PNG")


@pytest.fixture
async def host() -> AsyncIterator[PictureHost]:
    async with picture_host() as found:
        yield found


async def refusal(host: PictureHost, path: str = "/a.png", **settings: Any) -> ImageError:
    async with fetcher(**settings) as found:
        with pytest.raises(ImageError) as caught:
            await found.resolve(host.url(path))
    return caught.value


async def test_fet_05_the_host_hears_its_name_and_is_dialled_by_address(host: PictureHost) -> None:
    host.answers["/a.png"] = answer(PICTURE)
    names = Names({"pictures.example": [["127.0.0.1"]]})
    async with fetcher(names) as found:
        await found.resolve(host.url("/a.png", "pictures.example"))
    assert host.asked[0].headers["host"] == f"pictures.example:{host.port}"
    assert names.num_lookups == 1


def certificate(folder: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context for a name, and a client's that trusts just it."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-keyout", key, "-out", cert, "-subj", f"/CN={name}",
         "-addext", f"subjectAltName=DNS:{name}"],
        check=True, capture_output=True,
    )  # fmt: skip
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    return server, ssl.create_default_context(cafile=str(cert))


async def test_fet_05_a_certificate_is_checked_for_the_name_and_not_tried_again(
    tmp_path: Path,
) -> None:
    tls_server, trust = certificate(tmp_path, "pictures.example")
    heard: list[str | None] = []
    tls_server.sni_callback = lambda _, name, __: heard.append(name)
    inner = PictureHost(answers={"/a.png": answer(PICTURE)})
    server = await asyncio.start_server(inner.serve, "127.0.0.1", 0, ssl=tls_server)
    port = server.sockets[0].getsockname()[1]
    names = Names({"pictures.example": [["127.0.0.1"]], "other.example": [["127.0.0.1"]]})
    try:
        async with fetcher(names, tls=trust) as found:
            await found.resolve(f"https://pictures.example:{port}/a.png")
            with pytest.raises(FailedToDownloadImage):
                await found.resolve(f"https://other.example:{port}/a.png")
    finally:
        server.close()
    assert heard == ["pictures.example", "other.example"]
    assert len(inner.asked) == 1


async def test_fet_06_a_proxy_of_the_environment_is_not_used(
    host: PictureHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.answers["/a.png"] = answer(PICTURE)
    async with picture_host() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url(""))
        async with fetcher() as found:
            await found.resolve(host.url("/a.png"))
    assert (proxy.num_connections, host.num_connections) == (0, 1)


async def test_fet_07_redirects_are_followed_three_times_without_cookies(host: PictureHost) -> None:
    host.answers |= {
        "/1": answer(status=301, Location="/2", Set_Cookie="a=b"),
        "/2": answer(status=302, Location="3?x=y", Set_Cookie="a=b; Path=/"),
        "/3": answer(status=308, Location=f"//127.0.0.1:{host.port}/4"),
        "/4": answer(PICTURE),
    }
    async with fetcher() as found:
        reply = await found.resolve(host.url("/1"))
    assert (reply.image.width, reply.image.height) == (40, 30)
    assert [asked.path for asked in host.asked] == ["/1", "/2", "/3?x=y", "/4"]
    for asked in host.asked:
        assert not {"cookie", "authorization", "referer"} & set(asked.headers)


async def test_fet_07_a_fourth_redirect_and_a_circle_are_refused(host: PictureHost) -> None:
    for index in range(5):
        host.answers[f"/{index}"] = answer(status=303, Location=f"/{index + 1}")
    host.answers["/round"] = answer(status=307, Location="/about")
    host.answers["/about"] = answer(status=307, Location="/round#x")
    assert isinstance(await refusal(host, "/0"), FailedToDownloadImage)
    assert host.num_connections <= 4
    assert host.num_asked("/4") == 0
    assert isinstance(await refusal(host, "/round"), FailedToDownloadImage)
    assert (host.num_asked("/round"), host.num_asked("/about")) == (1, 1)


async def test_fet_08_domain_lists_are_asked_at_every_hop(host: PictureHost) -> None:
    host.answers["/a.png"] = answer(status=302, Location=host.url("/b.png", "bad.example"))
    host.answers["/b.png"] = answer(PICTURE)
    names = Names({"good.example": [["127.0.0.1"]], "bad.example": [["127.0.0.1"]]})
    async with fetcher(names, denied_domains=("bad.example",)) as found:
        with pytest.raises(InvalidImageUrl):
            await found.resolve(host.url("/a.png", "good.example"))
    assert host.num_asked("/b.png") == 0


async def test_fet_09_addresses_inside_a_body_are_not_fetched(host: PictureHost) -> None:
    inner = host.url("/inner.png").encode()
    page = b"<html><img src='%s'> ![x](%s) " % (inner, inner) + b"x" * 600
    host.answers |= {
        "/a": answer(page, Content_Type="text/html"),
        "/b": answer(b"![x](%s)" % inner),
    }
    for path in ("/a", "/b"):
        assert isinstance(await refusal(host, path), UnsupportedImageMediaType)
    assert host.num_asked("/inner.png") == 0


async def test_fet_11_no_compression_is_asked_for_or_taken(host: PictureHost) -> None:
    host.answers["/a.png"] = answer(gzip.compress(PICTURE), Content_Encoding="gzip")
    assert isinstance(await refusal(host), FailedToDownloadImage)
    assert host.asked[0].headers["accept-encoding"] == "identity"
    assert len(host.asked) == 1


async def test_fet_11_a_declared_length_over_the_limit_is_refused_unread(host: PictureHost) -> None:
    async def endless(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b"", length=10**12))
        await asyncio.Event().wait()

    host.answers["/a.png"] = endless
    assert isinstance(await refusal(host), ImageFileTooLarge)


async def test_fet_11_a_body_that_never_ends_is_cut_at_the_limit(host: PictureHost) -> None:
    sent = 0

    async def flood(asked: Asked, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(raw("HTTP/1.1 200 OK", body=PICTURE))
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536

    host.answers["/a.png"] = flood
    assert isinstance(await refusal(host, max_image_bytes=1_000_000), ImageFileTooLarge)
    assert sent < 20_000_000


CHUNKED = raw(
    "HTTP/1.1 200 OK", "Transfer-Encoding: chunked", body=b"%x\r\n%s\r\n" % (len(PICTURE), PICTURE)
)


@pytest.mark.parametrize(
    "lie",
    [
        answer(PICTURE, length=len(PICTURE) + 100),
        CHUNKED,
        CHUNKED + b"zz\r\n",
        raw("HTTP/1.1 200 OK", "Content-Length: -5", body=PICTURE),
        raw(
            "HTTP/1.1 200 OK", "Content-Length: 5", f"Content-Length: {len(PICTURE)}", body=PICTURE
        ),
        raw("HTTP/1.1 200 OK", "Content-Length: many", body=PICTURE),
        raw("HTTP/1.1 200 OK", "X: " + "y" * 100_000, body=PICTURE),
        b"HTTP/9.9 hello\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"",
    ],
)
async def test_fet_11_lying_lengths_and_broken_answers_are_no_pictures(
    host: PictureHost, lie: bytes
) -> None:
    host.answers["/a.png"] = lie
    assert isinstance(await refusal(host), FailedToDownloadImage)


async def test_fet_11_a_picture_that_its_host_cut_is_no_picture(host: PictureHost) -> None:
    host.answers["/a.png"] = answer(PICTURE[:20])
    assert isinstance(await refusal(host), ImageParseError)


async def test_fet_11_whole_chunked_and_unmeasured_bodies_are_taken(host: PictureHost) -> None:
    host.answers["/a.png"] = CHUNKED + b"0\r\n\r\n"
    host.answers["/b.png"] = raw("HTTP/1.0 200 OK", body=PICTURE)
    async with fetcher() as found:
        for path in ("/a.png", "/b.png"):
            assert (await found.resolve(host.url(path))).image.size_bytes == len(PICTURE)


async def test_fet_12_a_silent_host_is_left_after_the_idle_time_without_another_try(
    host: PictureHost,
) -> None:
    async def silent(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    host.answers["/a.png"] = silent
    assert isinstance(await refusal(host, idle_timeout_s=0.1), FailedToDownloadImage)
    assert len(host.asked) == 1


async def test_fet_12_a_dripping_host_is_cut_by_the_total(host: PictureHost) -> None:
    gone = asyncio.Event()

    async def drip(asked: Asked, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(answer(b"", length=len(PICTURE)))
            for byte in PICTURE:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.02)
        finally:
            gone.set()

    host.answers["/a.png"] = drip
    error = await refusal(host, idle_timeout_s=1.0, total_timeout_s=0.3)
    assert isinstance(error, FailedToDownloadImage)
    async with asyncio.timeout(5):
        await gone.wait()
    assert len(host.asked) == 1


async def test_fet_12_the_total_covers_redirects_and_retries(host: PictureHost) -> None:
    async def slow(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.2)
        writer.write(answer(status=302, Location=f"/{len(host.asked)}"))

    for index in range(9):
        host.answers[f"/{index}"] = slow
    error = await refusal(host, "/0", total_timeout_s=0.5, max_redirects=8)
    assert isinstance(error, FailedToDownloadImage)
    assert len(host.asked) <= 3


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 599])
async def test_fet_13_what_may_pass_is_tried_again(host: PictureHost, status: int) -> None:
    async def recover(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(PICTURE) if len(host.asked) == 3 else answer(status=status))

    host.answers["/a.png"] = recover
    async with fetcher() as found:
        assert (await found.resolve(host.url("/a.png"))).image.width == 40
    assert len(host.asked) == 3


@pytest.mark.parametrize("fault", ["reset", "cut"])
async def test_fet_13_resets_are_tried_again(host: PictureHost, fault: str) -> None:
    async def recover(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if len(host.asked) == 3:
            writer.write(answer(PICTURE))
        elif fault == "cut":
            writer.write(answer(PICTURE, length=len(PICTURE) + 1))
        else:
            writer.transport.abort()

    host.answers["/a.png"] = recover
    async with fetcher() as found:
        assert (await found.resolve(host.url("/a.png"))).image.width == 40
    assert len(host.asked) == 3


async def test_fet_13_a_closed_port_is_tried_three_times_and_no_more() -> None:
    async with picture_host() as closed:
        pass
    names = Names({"pictures.example": [["127.0.0.1"]]})
    async with fetcher(names) as found:
        with pytest.raises(FailedToDownloadImage):
            await found.resolve(closed.url("/a.png", "pictures.example"))
    assert names.num_lookups == 3


async def test_fet_13_a_wish_to_wait_that_does_not_fit_ends_the_tries(host: PictureHost) -> None:
    host.answers["/a.png"] = answer(status=429, Retry_After="60")
    assert isinstance(await refusal(host), FailedToDownloadImage)
    assert len(host.asked) == 1


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (201, FailedToDownloadImage), (202, FailedToDownloadImage), (206, FailedToDownloadImage),
        (204, EmptyImageFile), (205, EmptyImageFile), (300, FailedToDownloadImage),
        (302, FailedToDownloadImage), (304, FailedToDownloadImage), (400, FailedToDownloadImage),
        (401, FailedToDownloadImage), (403, FailedToDownloadImage), (404, FailedToDownloadImage),
        (410, FailedToDownloadImage), (451, FailedToDownloadImage), (200, EmptyImageFile),
    ],
)  # fmt: skip
async def test_fet_14_each_status_has_its_answer_and_no_second_try(
    host: PictureHost, status: int, kind: type[ImageError]
) -> None:
    host.answers["/a.png"] = answer(status=status)
    assert type(await refusal(host)) is kind
    assert len(host.asked) == 1


@pytest.mark.parametrize("declared", ["text/html", "application/octet-stream", "image/jpeg", ""])
async def test_fet_15_bytes_say_what_a_picture_is(host: PictureHost, declared: str) -> None:
    host.answers["/a"] = answer(PICTURE, Content_Type=declared)
    async with fetcher() as found:
        assert (await found.resolve(host.url("/a"))).image.media_type == "image/png"


@pytest.mark.parametrize(
    "body",
    [b"<html></html>", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.7", b"\0" * 5000,
     b"%!PS-Adobe", b"\x97\xe6 noise\x02\xd1\xd8 no head\xac"],
)  # fmt: skip
async def test_fet_15_what_is_no_picture_is_refused(host: PictureHost, body: bytes) -> None:
    host.answers["/a.png"] = answer(b"\1" + body, Content_Type="image/png")
    assert isinstance(await refusal(host), UnsupportedImageMediaType)


async def test_fet_15_a_page_and_a_drawing_are_not_read_to_their_end(host: PictureHost) -> None:
    async def page(asked: Asked, writer: asyncio.StreamWriter) -> None:
        kind = "image/svg+xml" if asked.path == "/svg" else "text/html"
        head = answer(b"", length=10_000_000, Content_Type=kind)
        writer.write(head + (b"" if asked.path == "/svg" else b"<html>" * 200))
        await writer.drain()
        await asyncio.Event().wait()

    host.answers |= {"/svg": page, "/html": page}
    for path in ("/svg", "/html"):
        assert isinstance(await refusal(host, path), UnsupportedImageMediaType)


async def test_fet_18_requests_are_plain_and_say_who_asks(host: PictureHost) -> None:
    host.answers["/a.png"] = answer(PICTURE)
    async with fetcher() as found:
        await found.resolve(host.url("/a.png"))
    assert set(host.asked[0].headers) <= {
        "host", "accept", "accept-encoding", "user-agent", "connection",
    }  # fmt: skip
    assert host.asked[0].headers["user-agent"].startswith("k3-fetcher/")
