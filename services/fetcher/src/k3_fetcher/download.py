"""Downloads: pinned to judged addresses, redirects judged again, bounded in bytes and time."""

import asyncio
import random
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from k3_fetcher.addresses import AddressPolicy
from k3_fetcher.settings import FetcherSettings
from k3_fetcher.urls import ImageUrl, join, matches_domain
from k3wire.errors import (
    EmptyImageFile,
    FailedToDownloadImage,
    ImageFileTooLarge,
    InvalidImageUrl,
    K3Error,
    UnsupportedImageMediaType,
)

HEADERS = {
    "Accept": "image/*",
    "Accept-Encoding": "identity",
    "User-Agent": "k3-fetcher/0.1",
}
REDIRECTS = (301, 302, 303, 307, 308)
TRANSIENT = (408, 429, 500, 502, 503, 504)
FIRST_PAUSE_S = 0.1
CHUNK_BYTES = 64 * 1024
REFUSED_TEXT = "The image URL's host is not allowed here"


@dataclass(frozen=True, slots=True)
class Downloaded:
    """What a host delivered.

    Attributes:
        data: the bytes, or b"" if the image has not changed.
        is_unchanged: the host said so (304).
        headers: of the answer.
    """

    data: bytes
    is_unchanged: bool
    headers: Mapping[str, str]


class TransientFailure(Exception):
    """Worth another try; carries what to tell the client if there is none."""

    def __init__(self, error: K3Error) -> None:
        super().__init__(error.message)
        self.error = error


class _PinnedResolver(AbstractResolver):
    """Gives the HTTP client only addresses that were judged, from one look-up."""

    def __init__(self, judge: "Downloader") -> None:
        self._judge = judge

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        addresses = await self._judge.resolve_name(host, port)
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        """Nothing to close."""


class Downloader:
    """Fetches images from the open internet."""

    def __init__(self, settings: FetcherSettings, policy: AddressPolicy) -> None:
        """Prepares; `open` makes the session."""
        self._settings = settings
        self._policy = policy
        self._ports = {int(port) for port in settings.allowed_ports}
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Makes the session; call on the event loop."""
        settings = self._settings
        connector = aiohttp.TCPConnector(
            limit=settings.max_downloads,
            limit_per_host=settings.max_downloads_per_host,
            resolver=_PinnedResolver(self),
            use_dns_cache=False,
            socket_factory=self._make_socket,
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
        if not self._policy.permits(str(address[0])):
            raise OSError("address refused")
        return socket.socket(family, kind, proto)

    async def resolve_name(self, host: str, port: int) -> list[str]:
        """Resolves a name once and judges every address; one bad address fails the name.

        Raises:
            OSError: it does not resolve, or an address is refused.
        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
        if not addresses or not all(map(self._policy.permits, addresses)):
            raise OSError("address refused")
        return addresses

    def check_lists(self, url: ImageUrl, param: str) -> None:
        """Judges a host by the operator's lists of domains.

        Raises:
            InvalidImageUrl: refused.
        """
        settings = self._settings
        is_denied = matches_domain(url.host, settings.denied_domains)
        is_left_out = bool(settings.allowed_domains) and not matches_domain(
            url.host, settings.allowed_domains
        )
        if is_denied or is_left_out:
            raise InvalidImageUrl(REFUSED_TEXT, param=param or None)

    async def check(self, url: ImageUrl, param: str) -> None:
        """Judges a URL before anything is sent: name, domain lists, addresses, port.

        Raises:
            InvalidImageUrl: refused; the text tells nothing of what the name resolved to.
            FailedToDownloadImage: the name does not resolve.
        """
        self.check_lists(url, param)
        refused = InvalidImageUrl(REFUSED_TEXT, param=param or None)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                found = await loop.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError, UnicodeError) as error:
            if url.is_blocked_name:
                raise refused from error
            raise FailedToDownloadImage(
                "The image URL's host cannot be found", param=param or None
            ) from error
        addresses = [str(info[4][0]) for info in found]
        is_opened = bool(addresses) and all(map(self._policy.is_opened, addresses))
        if not is_opened and (url.is_blocked_name or url.port not in self._ports):
            raise refused
        if not addresses or not all(map(self._policy.permits, addresses)):
            raise refused

    async def fetch(self, url: ImageUrl, validators: Mapping[str, str], param: str) -> Downloaded:
        """Downloads an image, following and judging redirects, retrying what may pass.

        Args:
            url: parsed.
            validators: headers that ask whether it changed; none for an unconditional fetch.
            param: path of the part, for errors.

        Raises:
            ImageError: refused, failed, too long, or no image.
        """
        failed = FailedToDownloadImage("The image took too long to download", param=param or None)
        try:
            async with asyncio.timeout(self._settings.total_timeout_s):
                for attempt in range(self._settings.max_retries + 1):
                    try:
                        return await self._follow(url, validators, param)
                    except TransientFailure as failure:
                        if attempt == self._settings.max_retries:
                            raise failure.error from failure
                        pause_s = FIRST_PAUSE_S * 2**attempt
                        await asyncio.sleep(pause_s * (0.5 + random.random()))
        except TimeoutError as error:
            raise failed from error
        raise failed

    async def _follow(self, url: ImageUrl, validators: Mapping[str, str], param: str) -> Downloaded:
        seen = {url.text}
        for _ in range(self._settings.max_redirects + 1):
            await self.check(url, param)
            result = await self._get(url, validators, param)
            match result:
                case Downloaded():
                    return result
                case location:
                    url = join(url, location, param, allows_http=self._settings.allows_http)
            if url.text in seen:
                raise FailedToDownloadImage("The image URL redirects in a circle", param=param)
            seen.add(url.text)
        raise FailedToDownloadImage("The image URL redirects too often", param=param or None)

    async def _get(
        self, url: ImageUrl, validators: Mapping[str, str], param: str
    ) -> Downloaded | str:
        assert self._session is not None, "open() comes first"
        try:
            async with self._session.get(
                URL(url.text, encoded=True),
                headers={**HEADERS, **validators},
                allow_redirects=False,
            ) as response:
                return await self._read(response, bool(validators), param)
        except TimeoutError as error:
            raise TransientFailure(
                FailedToDownloadImage("The image's host does not answer", param=param or None)
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise TransientFailure(
                FailedToDownloadImage("The image could not be downloaded", param=param or None)
            ) from error

    async def _read(
        self, response: aiohttp.ClientResponse, is_conditional: bool, param: str
    ) -> Downloaded | str:
        status = response.status
        if status in REDIRECTS and response.headers.get("Location"):
            return response.headers["Location"]
        if status == 304 and is_conditional:
            return Downloaded(b"", True, response.headers)
        failed = FailedToDownloadImage(
            f"The image's host answered with status {status}", param=param or None
        )
        if status in TRANSIENT:
            raise TransientFailure(failed)
        if status in (204, 205):
            raise EmptyImageFile("The image has no bytes", param=param or None)
        if status != 200:
            raise failed
        self._check_headers(response.headers, param)
        return Downloaded(await self._read_body(response, param), False, response.headers)

    def _check_headers(self, headers: Mapping[str, str], param: str) -> None:
        if headers.get("Content-Encoding", "identity").lower() not in ("identity", ""):
            raise FailedToDownloadImage("The image's host compressed it", param=param or None)
        media_type = headers.get("Content-Type", "").split(";")[0].strip().lower()
        if media_type in ("text/html", "image/svg+xml", "application/pdf"):
            raise UnsupportedImageMediaType(
                "The image URL leads to no picture that is served here", param=param or None
            )
        length = headers.get("Content-Length", "")
        if length.isdigit() and int(length) > self._settings.max_image_bytes:
            raise self._too_large(param)

    async def _read_body(self, response: aiohttp.ClientResponse, param: str) -> bytes:
        parts: list[bytes] = []
        size = 0
        async for chunk in response.content.iter_chunked(CHUNK_BYTES):
            size += len(chunk)
            if size > self._settings.max_image_bytes:
                raise self._too_large(param)
            parts.append(chunk)
        if not size:
            raise EmptyImageFile("The image has no bytes", param=param or None)
        return b"".join(parts)

    def _too_large(self, param: str) -> ImageFileTooLarge:
        limit = self._settings.max_image_bytes
        return ImageFileTooLarge(f"An image may have at most {limit} bytes", param=param or None)
