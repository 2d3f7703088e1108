"""Who may be asked: names, ports, domain lists and resolved addresses, judged before a byte is sent.

A URL enters; the addresses that may be dialled for it leave, from one look-up, or a refusal whose
text tells nothing of what the name resolved to. The HTTP client dials those and looks up nothing.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from k3_fetcher.addresses import AddressPolicy
from k3_fetcher.settings import FetcherSettings
from k3_fetcher.urls import ImageUrl, matches_domain
from k3wire.errors import FailedToDownloadImage, InvalidImageUrl

REFUSED_TEXT = "The image URL's host is not allowed here"
MAX_LOOKUPS = 32
"""Name look-ups at once; a slow name server must not hold up everybody."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Gives the addresses of a host; raises OSError if it has none."""


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """One host that was asked on the way to an image; kept, to be judged again at every hit.

    Attributes:
        host: as in `ImageUrl`.
        port: likewise.
        addresses: what it resolved to, all of them permitted then.
    """

    host: str
    port: int
    addresses: tuple[str, ...]


class SystemResolver:
    """The system's resolver, on threads of its own."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_LOOKUPS, thread_name_prefix="lookup")

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """Looks a host up; see `Resolve`."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, _look_up, host, port)
        return tuple(dict.fromkeys(found))

    def close(self) -> None:
        """Lets the threads end; does not wait for a look-up that hangs."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _look_up(host: str, port: int) -> list[str]:
    return [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class Gate:
    """Judges URLs."""

    def __init__(self, settings: FetcherSettings, policy: AddressPolicy, resolve: Resolve) -> None:
        """Takes the operator's rules.

        Args:
            settings: domains, ports and times.
            policy: addresses.
            resolve: names to addresses.
        """
        self._settings = settings
        self._policy = policy
        self._resolve = resolve
        self._ports = frozenset(settings.allowed_ports)

    def permits_address(self, address: str) -> bool:
        """Whether an address may be dialled; the last word, asked with the very address."""
        return self._policy.permits(address)

    def check_lists(self, host: str, param: str) -> None:
        """Judges a host by the operator's lists of domains.

        Raises:
            InvalidImageUrl: refused.
        """
        denied, allowed = self._settings.denied_domains, self._settings.allowed_domains
        if matches_domain(host, denied) or (allowed and not matches_domain(host, allowed)):
            raise _refused(param)

    def permits_again(self, hops: Sequence[Hop]) -> bool:
        """Whether what was asked once might be asked today; judges without a look-up."""
        for hop in hops:
            try:
                self.check_lists(hop.host, "")
            except InvalidImageUrl:
                return False
            if not self._permits(hop.port, hop.addresses, is_blocked=False):
                return False
        return True

    def _permits(self, port: int, addresses: Sequence[str], *, is_blocked: bool) -> bool:
        if not addresses or not all(map(self._policy.permits, addresses)):
            return False
        # Networks that the operator opened are his own: any port, and names like localhost.
        is_opened = all(map(self._policy.is_opened, addresses))
        return is_opened or (port in self._ports and not is_blocked)

    async def admit(self, url: ImageUrl, param: str) -> Hop:
        """Judges a URL and gives the addresses to dial.

        Raises:
            InvalidImageUrl: refused.
            FailedToDownloadImage: the name does not resolve.
        """
        self.check_lists(url.host, param)
        if url.is_blocked_name and not self._settings.allowed_networks:
            raise _refused(param)
        addresses = (url.host,) if url.is_literal else await self._look_up(url, param)
        if not self._permits(url.port, addresses, is_blocked=url.is_blocked_name):
            raise _refused(param)
        return Hop(host=url.host, port=url.port, addresses=tuple(addresses))

    async def _look_up(self, url: ImageUrl, param: str) -> Sequence[str]:
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                return await self._resolve(url.host, url.port)
        except (OSError, TimeoutError, UnicodeError) as error:
            if url.is_blocked_name:
                raise _refused(param) from error
            raise FailedToDownloadImage(
                "The image URL's host cannot be found", param=param or None
            ) from error


def _refused(param: str) -> InvalidImageUrl:
    return InvalidImageUrl(REFUSED_TEXT, param=param or None)
