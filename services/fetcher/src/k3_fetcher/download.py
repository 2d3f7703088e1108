"""Downloads: pinned to judged addresses, redirects judged again, bounded in bytes and time."""

import asyncio
import random
import socket
import ssl
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from k3_fetcher.budget import ByteBudget
from k3_fetcher.freshness import retry_after_s
from k3_fetcher.gate import Gate, Hop
from k3_fetcher.settings import FetcherSettings
from k3_fetcher.urls import ImageUrl, join
from k3text.images.header import sniff
from k3wire.errors import (
    EmptyImageFile,
    FailedToDownloadImage,
    ImageError,
    ImageFileTooLarge,
    InvalidImageUrl,
    UnsupportedImageMediaType,
)

HEADERS = {
    "Accept": "image/*",
    "Accept-Encoding": "identity",
    "User-Agent": "k3-fetcher/0.1",
}
REDIRECTS = (301, 302, 303, 307, 308)
TRANSIENT = (408, 429)
"""Worth another try, and so is every 5xx."""

FIRST_PAUSE_S = 0.1
CHUNK_BYTES = 64 * 1024
SNIFF_BYTES = 512
"""So many bytes of a body show whether it is a picture; a page is not read to its end."""

_pinned: ContextVar[Hop | None] = ContextVar("pinned", default=None)


@dataclass(frozen=True, slots=True)
class Downloaded:
    """What a host delivered.

    Attributes:
        data: the bytes, or b"" if the image has not changed.
        is_unchanged: the host said so (304).
        headers: of the answer.
        hops: every host that was asked.
    """

    data: bytes
    is_unchanged: bool
    headers: Mapping[str, str]
    hops: tuple[Hop, ...]


class DownloadFailed(Exception):
    """No image, and how long that may be believed.

    Attributes:
        error: what to tell the client.
        is_passing: another try may fare better in a second or two.
        pause_s: least pause before another try, None if there must be none.
    """

    def __init__(
        self, error: ImageError, *, is_passing: bool = False, pause_s: float | None = None
    ) -> None:
        super().__init__(error.message)
        self.error = error
        self.is_passing = is_passing
        self.pause_s = pause_s


class _PinnedResolver(AbstractResolver):
    """Gives the HTTP client the addresses that were judged, and no look-up of its own."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        hop = _pinned.get()
        if hop is None or hop.host != host:
            raise OSError("no judged address")
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in hop.addresses
        ]

    async def close(self) -> None:
        """Nothing to close."""


class Downloader:
    """Fetches images from the open internet."""

    def __init__(
        self, settings: FetcherSettings, gate: Gate, tls: ssl.SSLContext | None = None
    ) -> None:
        """Prepares; `open` makes the session.

        Args:
            settings: limits.
            gate: judges every host before it is asked.
            tls: who is trusted; the system's authorities if None.
        """
        self._settings = settings
        self._gate = gate
        self._tls = tls
        self._budget = ByteBudget(settings.max_pending_bytes)
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Makes the session; call on the event loop."""
        settings = self._settings
        connector = aiohttp.TCPConnector(
            limit=settings.max_downloads,
            limit_per_host=settings.max_downloads_per_host,
            resolver=_PinnedResolver(),
            use_dns_cache=False,
            socket_factory=self._make_socket,
            ssl=self._tls or True,
        )
        timeout = aiohttp.ClientTimeout(
            total=settings.total_timeout_s,
            sock_connect=settings.connect_timeout_s,
            sock_read=settings.idle_timeout_s,
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Closes the session; safe twice."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _make_socket(self, info: Any) -> socket.socket:
        # The last word before a connection: whatever led here, this address is what is dialled.
        family, kind, proto, _, address = info
        if not self._gate.permits_address(str(address[0])):
            raise OSError("address refused")
        return socket.socket(family, kind, proto)

    async def fetch(self, url: ImageUrl, validators: Mapping[str, str]) -> Downloaded:
        """Downloads an image, following and judging redirects, retrying what may pass.

        Args:
            url: parsed.
            validators: headers that ask whether it changed; none for an unconditional fetch.

        Raises:
            DownloadFailed: refused, failed, too long, or no image.
        """
        try:
            async with asyncio.timeout(self._settings.total_timeout_s) as limit:
                for attempt in range(self._settings.max_retries + 1):
                    try:
                        return await self._follow(url, validators)
                    except DownloadFailed as failure:
                        pause_s = self._pause_s(failure, attempt)
                        left_s = (limit.when() or 0) - asyncio.get_running_loop().time()
                        if pause_s is None or pause_s >= left_s:
                            raise
                    await asyncio.sleep(pause_s)
        except TimeoutError as error:
            raise _passing("The image took too long to download") from error
        raise AssertionError("the last attempt returns or raises")

    def _pause_s(self, failure: DownloadFailed, attempt: int) -> float | None:
        if failure.pause_s is None or attempt >= self._settings.max_retries:
            return None
        return max(failure.pause_s, FIRST_PAUSE_S * 2**attempt) * (1 + 0.5 * random.random())

    async def _follow(self, url: ImageUrl, validators: Mapping[str, str]) -> Downloaded:
        seen: set[str] = set()
        hops: list[Hop] = []
        try:
            for _ in range(self._settings.max_redirects + 1):
                if url.text in seen:
                    raise DownloadFailed(
                        FailedToDownloadImage("The image URL redirects in a circle")
                    )
                seen.add(url.text)
                hops.append(await self._gate.admit(url, ""))
                result = await self._get(url, hops, validators)
                match result:
                    case Downloaded():
                        return result
                    case location:
                        url = join(url, location, "", allows_http=self._settings.allows_http)
        except InvalidImageUrl as error:
            raise DownloadFailed(error) from error
        except FailedToDownloadImage as error:
            raise DownloadFailed(error, is_passing=True) from error
        raise DownloadFailed(FailedToDownloadImage("The image URL redirects too often"))

    async def _get(
        self, url: ImageUrl, hops: list[Hop], validators: Mapping[str, str]
    ) -> Downloaded | str:
        assert self._session is not None, "open() comes first"
        target = URL(url.text, encoded=True)
        if target.host != url.host or target.port != url.port:
            raise InvalidImageUrl("The image URL cannot be read")
        pin = _pinned.set(hops[-1])
        try:
            async with self._session.get(
                target, headers={**HEADERS, **validators}, allow_redirects=False
            ) as response:
                return await self._read(response, tuple(hops), is_conditional=bool(validators))
        except (aiohttp.ClientError, OSError) as error:
            # A time-out is an OSError too.
            raise _failure(error) from error
        finally:
            _pinned.reset(pin)

    async def _read(
        self, response: aiohttp.ClientResponse, hops: tuple[Hop, ...], *, is_conditional: bool
    ) -> Downloaded | str:
        status, headers = response.status, _joined(response.headers)
        if status in REDIRECTS and headers.get("Location"):
            return headers["Location"]
        if status == 304 and is_conditional:
            return Downloaded(b"", True, headers, hops)
        if status in (204, 205):
            raise DownloadFailed(EmptyImageFile("The image has no bytes"))
        if status != 200:
            error = FailedToDownloadImage(f"The image's host answered with status {status}")
            if status in TRANSIENT or status >= 500:
                raise DownloadFailed(error, is_passing=True, pause_s=retry_after_s(headers))
            raise DownloadFailed(error)
        length = self._check_headers(headers)
        async with self._budget.take(length):
            data = await self._read_body(response)
        return Downloaded(data, False, headers, hops)

    def _check_headers(self, headers: Mapping[str, str]) -> int:
        """Refuses what the headers already show; gives the longest body that may come."""
        if headers.get("Content-Encoding", "identity").strip().lower() not in ("identity", ""):
            raise DownloadFailed(FailedToDownloadImage("The image's host compressed it"))
        media_type = headers.get("Content-Type", "").split(";")[0].strip().lower()
        if media_type == "image/svg+xml":
            raise DownloadFailed(_unsupported())
        length = headers.get("Content-Length", "")
        if not length.isdecimal():
            return self._settings.max_image_bytes
        if int(length) > self._settings.max_image_bytes:
            raise DownloadFailed(self._too_large())
        return int(length)

    async def _read_body(self, response: aiohttp.ClientResponse) -> bytes:
        data = bytearray()
        is_sniffed = False
        async for chunk in response.content.iter_chunked(CHUNK_BYTES):
            data += chunk
            if len(data) > self._settings.max_image_bytes:
                raise DownloadFailed(self._too_large())
            if not is_sniffed and len(data) >= SNIFF_BYTES:
                is_sniffed = True
                if sniff(bytes(data[:SNIFF_BYTES])) not in self._settings.media_types:
                    raise DownloadFailed(_unsupported())
        if not data:
            raise DownloadFailed(EmptyImageFile("The image has no bytes"))
        return bytes(data)

    def _too_large(self) -> ImageFileTooLarge:
        return ImageFileTooLarge(
            f"An image may have at most {self._settings.max_image_bytes} bytes"
        )


def _joined(headers: CIMultiDictProxy[str]) -> Mapping[str, str]:
    """Gives each header once, repeated ones as one list, as HTTP reads them."""
    return CIMultiDict((name, ", ".join(headers.getall(name))) for name in set(headers))


def _unsupported() -> UnsupportedImageMediaType:
    return UnsupportedImageMediaType("The image URL leads to no picture that is served here")


def _passing(text: str, pause_s: float | None = None) -> DownloadFailed:
    return DownloadFailed(FailedToDownloadImage(text), is_passing=True, pause_s=pause_s)


def _failure(error: Exception) -> DownloadFailed:
    match error:
        case aiohttp.ClientSSLError():
            return DownloadFailed(
                FailedToDownloadImage("The image's host has no valid certificate")
            )
        case aiohttp.ConnectionTimeoutError():
            return _passing("The image's host does not answer", 0.0)
        case TimeoutError():
            return _passing("The image's host does not answer")
        case aiohttp.ClientConnectionError() | aiohttp.ClientPayloadError() | OSError():
            return _passing("The image could not be downloaded", 0.0)
        case _:
            return _passing("The image's host does not speak HTTP as it should")
