"""Image URLs: parsed once, strictly, and rebuilt; the HTTP client gets what was rebuilt.

What parsers disagree about (backslashes, user info, white space, odd ports) is refused rather than
interpreted.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from urllib.parse import quote, urljoin, urlsplit

from k3wire.errors import InvalidImageUrl
from k3wire.messages.fetch import MAX_URL_CHARS

DEFAULT_PORTS = {"http": 80, "https": 443}
BLOCKED_NAMES = frozenset(
    (
        "localhost", "metadata", "metadata.google.internal", "metadata.goog", "kubernetes.default",
        "kubernetes.default.svc", "instance-data",
    )
)  # fmt: skip
BLOCKED_SUFFIXES = (".localhost", ".local", ".internal", ".localdomain", ".home.arpa")

# Surrogates that stand for no byte among them; those that do are a redirect's raw bytes.
_FORBIDDEN = re.compile(r"[\x00-\x20\x7f\\<>\"{}|^`\ud800-\udc7f\udd00-\udfff]")
_BRACKETED = re.compile(r"\[[^\[\]]*\](:[0-9]*)?\Z")
"""An IPv6 address and nothing else; beside it, only some parsers see another host."""

_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)\Z")
_NUMBER = re.compile(r"(0x[0-9a-f]*|[0-9]+)\Z")
_SAFE = "/:@!$&'()*+,;=-._~%?"


@dataclass(frozen=True, slots=True)
class ImageUrl:
    """A normalised address.

    Attributes:
        scheme: http or https.
        host: ASCII, lower case, without a trailing dot; an IPv6 literal without brackets.
        port: always given.
        target: path and query.
        is_literal: the host is an address in its usual spelling.
    """

    scheme: str
    host: str
    port: int
    target: str
    is_literal: bool

    @property
    def text(self) -> str:
        """The whole URL, as it is asked for and used as a key."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == DEFAULT_PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.target}"

    @property
    def is_blocked_name(self) -> bool:
        """Whether the name is known to mean this machine or its cloud."""
        return self.host in BLOCKED_NAMES or self.host.endswith(BLOCKED_SUFFIXES)


def parse_url(text: str, param: str, *, allows_http: bool) -> ImageUrl:
    """Parses a client's or a redirect's URL.

    Raises:
        InvalidImageUrl: malformed, or of a scheme that is not fetched.
    """
    text = text.strip(" \t\r\n")
    if not text or len(text) > MAX_URL_CHARS:
        raise _refuse(f"must have 1 to {MAX_URL_CHARS} characters", param)
    if _FORBIDDEN.search(text):
        raise _refuse("has characters that must be percent-encoded", param)
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise _refuse("cannot be read", param) from error
    schemes = ("http", "https") if allows_http else ("https",)
    if parts.scheme not in schemes:
        raise _refuse(f"must begin with {' or '.join(f'{s}://' for s in schemes)} or data:", param)
    if "@" in parts.netloc or "%" in parts.netloc:
        raise _refuse("must not hold a user name or an encoded host", param)
    host, is_literal = _normalise_host(parts.hostname or "", param)
    is_bracketed = _BRACKETED.match(parts.netloc) is not None
    if is_bracketed != (":" in host) or is_bracketed != ("[" in parts.netloc):
        raise _refuse("has no usable host name", param)
    if port == 0:
        raise _refuse("has an unusable port", param)
    target = _quote(parts.path or "/")
    if parts.query:
        target += "?" + _quote(parts.query)
    return ImageUrl(parts.scheme, host, port or DEFAULT_PORTS[parts.scheme], target, is_literal)


def _quote(text: str) -> str:
    # Hosts redirect to names in old encodings, unescaped: their bytes are kept, as browsers do.
    return quote(text, safe=_SAFE, errors="surrogateescape")


def _normalise_host(host: str, param: str) -> tuple[str, bool]:
    try:
        address = ip_address(host)
    except ValueError:
        return _normalise_name(host, param), False
    if isinstance(address, IPv6Address) and address.scope_id is not None:
        raise _refuse("must not name a network interface", param)
    return str(address), True


def _normalise_name(host: str, param: str) -> str:
    try:
        name = host.encode("idna").decode().lower().rstrip(".") if host else ""
    except UnicodeError as error:
        raise _refuse("has a host name that does not exist", param) from error
    labels = name.split(".")
    if not name or len(name) > 253 or not all(map(_LABEL.match, labels)):
        raise _refuse("has no usable host name", param)
    if _NUMBER.match(labels[-1]):
        # 127.1, 0x7f.1, 2130706433: addresses in spellings that only some parsers know.
        raise _refuse("must write an address as four plain numbers", param)
    return name


def join(base: ImageUrl, location: str, param: str, *, allows_http: bool) -> ImageUrl:
    """Resolves a redirect against the URL that answered it.

    Raises:
        InvalidImageUrl: as `parse_url`, or from https back to http.
    """
    if _FORBIDDEN.search(location):
        raise _refuse("redirects to a malformed address", param)
    try:
        joined = urljoin(base.text, location)
    except ValueError as error:
        raise _refuse("redirects to a malformed address", param) from error
    target = parse_url(joined, param, allows_http=allows_http)
    if base.scheme == "https" and target.scheme == "http":
        raise _refuse("redirects from https to http", param)
    return target


def matches_domain(host: str, patterns: Sequence[str]) -> bool:
    """Whether a host is one of `a.b`, or below one of `*.a.b`."""
    for pattern in patterns:
        name = pattern.lower().rstrip(".")
        if name.startswith("*."):
            if host.endswith(name[1:]):
                return True
        elif host == name:
            return True
    return False


def _refuse(what: str, param: str) -> InvalidImageUrl:
    return InvalidImageUrl(f"The image URL {what}", param=param or None)
