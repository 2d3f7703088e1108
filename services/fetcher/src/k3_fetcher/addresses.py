"""Which addresses may be connected to: judged as numbers, after resolving, with tunnels unwrapped.

Python's own `is_global` calls multicast, NAT64, 6to4, site-local and some clouds' metadata services
global, hence a list of ours.

Source: IANA special-purpose address registries; the clouds' documented metadata addresses.
"""

from collections.abc import Iterable, Sequence
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

DENIED: tuple[Network, ...] = tuple(
    ip_network(text)
    for text in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16",
        "172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16",
        "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
        "168.63.129.16/32", "::/3", "4000::/2", "8000::/1", "2001::/23", "2001:db8::/32",
        "3fff::/20",
    )
)  # fmt: skip
"""Everything that is not the public internet, or speaks for the machine's own cloud.

Of IPv6 only 2000::/3 is public; the three wide networks are all the rest, among them ::1, fc00::/7
(one cloud's metadata), fe80::/10, fec0::/10, ff00::/8, 64:ff9b:1::/48, 100::/64 and 5f00::/16.
"""

_MAPPED = ip_network("::ffff:0:0/96")
_NAT64 = ip_network("64:ff9b::/96")
_SIX_TO_FOUR = ip_network("2002::/16")


def parse_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Reads networks in CIDR notation.

    Raises:
        ValueError: one is malformed; the message names it.
    """
    return tuple(ip_network(text, strict=False) for text in texts)


def unwrap(address: Address) -> Address:
    """Gives the IPv4 address inside a mapped, NAT64 or 6to4 address, or the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address in _MAPPED or address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    if address in _SIX_TO_FOUR:
        return IPv4Address((int(address) >> 80) & 0xFFFFFFFF)
    return address


def _within(address: Address, networks: Sequence[Network]) -> bool:
    return any(address.version == network.version and address in network for network in networks)


class AddressPolicy:
    """Says which addresses may be connected to."""

    def __init__(self, allowed: Sequence[Network], denied: Sequence[Network]) -> None:
        """Takes the operator's additions.

        Args:
            allowed: opened although the built-in list denies them.
            denied: denied on top of it; wins over `allowed`.
        """
        self._allowed = tuple(allowed)
        self._denied = tuple(denied)

    def is_opened(self, text: str) -> bool:
        """Whether the operator opened the network of an address."""
        found = _parse(text)
        return found is not None and _within(found, self._allowed)

    def permits(self, text: str) -> bool:
        """Whether an address, as the resolver or a socket writes it, may be connected to."""
        found = _parse(text)
        if found is None or _within(found, self._denied):
            return False
        return _within(found, self._allowed) or not _within(found, DENIED)


def _parse(text: str) -> Address | None:
    if "%" in text:
        # A scope id names one of our own links.
        return None
    try:
        return unwrap(ip_address(text))
    except ValueError:
        return None
