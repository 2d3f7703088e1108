"""How long a downloaded image stays fresh, from its HTTP headers.

Source: RFC 9111, sections 4 and 5.2.
"""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

_DIRECTIVE = re.compile(r"([a-z-]+)(?:=\"?([^\",]*)\"?)?")


@dataclass(frozen=True, slots=True)
class Freshness:
    """What the headers allow.

    Attributes:
        ttl_s: how long the image may be used without asking, from now.
        is_storable: whether it may be remembered at all.
        etag: to ask whether it changed, "" if there is none.
        last_modified: likewise.
    """

    ttl_s: float
    is_storable: bool
    etag: str
    last_modified: str


def _directives(text: str) -> dict[str, str]:
    return {m.group(1): m.group(2) or "" for m in _DIRECTIVE.finditer(text.lower())}


def _seconds(text: str) -> float | None:
    return float(text) if text.isascii() and text.isdigit() else None


def _date_s(text: str) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def _lifetime_s(headers: Mapping[str, str], control: Mapping[str, str]) -> float | None:
    """Gives what the host said; None if it said nothing. What cannot be read is stale."""
    for name in ("s-maxage", "max-age"):
        if name in control:
            return _seconds(control[name]) or 0.0
    if "Expires" not in headers:
        return None
    expires_s = _date_s(headers["Expires"])
    date_s = _date_s(headers.get("Date", "")) or time.time()
    return expires_s - date_s if expires_s is not None else 0.0


def read_freshness(headers: Mapping[str, str], default_ttl_s: float, max_ttl_s: float) -> Freshness:
    """Reads the headers of a 200 or 304 answer.

    Args:
        headers: case-insensitive.
        default_ttl_s: where the host says nothing.
        max_ttl_s: the most that is believed.
    """
    control = _directives(headers.get("Cache-Control", ""))
    lifetime_s = _lifetime_s(headers, control)
    ttl_s = default_ttl_s
    if lifetime_s is not None:
        ttl_s = lifetime_s - (_seconds(headers.get("Age", "").strip()) or 0.0)
    varies = [name.strip() for name in headers.get("Vary", "").split(",")]
    is_storable = "no-store" not in control
    if not is_storable or "no-cache" in control or "*" in varies:
        ttl_s = 0.0
    return Freshness(
        ttl_s=min(max(ttl_s, 0.0), max_ttl_s),
        is_storable=is_storable,
        etag=_validator(headers.get("ETag", "")),
        last_modified=_validator(headers.get("Last-Modified", "")),
    )


def _validator(text: str) -> str:
    # Bytes that are no text can be neither kept nor sent back; the picture is none the worse.
    return text if text.isprintable() else ""


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Gives how long a host asks to be left alone; 0 if it does not say."""
    text = headers.get("Retry-After", "").strip()
    if not text:
        return 0.0
    seconds = _seconds(text)
    if seconds is None:
        date_s = _date_s(text)
        seconds = date_s - time.time() if date_s is not None else 0.0
    return max(0.0, seconds)
