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
    return float(text) if text.isdigit() else None


def _date_s(text: str) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def read_freshness(headers: Mapping[str, str], default_ttl_s: float, max_ttl_s: float) -> Freshness:
    """Reads the headers of a 200 or 304 answer.

    Args:
        headers: case-insensitive.
        default_ttl_s: where the host says nothing.
        max_ttl_s: the most that is believed.
    """
    control = _directives(headers.get("Cache-Control", ""))
    age_s = _seconds(headers.get("Age", "").strip()) or 0.0
    ttl_s = default_ttl_s
    lifetime = _seconds(control.get("s-maxage", "")) if "s-maxage" in control else None
    if lifetime is None:
        lifetime = _seconds(control.get("max-age", ""))
    if lifetime is not None:
        ttl_s = lifetime - age_s
    elif headers.get("Expires"):
        expires_s = _date_s(headers["Expires"])
        date_s = _date_s(headers.get("Date", "")) or time.time()
        ttl_s = (expires_s - date_s - age_s) if expires_s is not None else 0.0
    if "no-cache" in control or headers.get("Vary", "").strip() == "*":
        ttl_s = 0.0
    is_storable = "no-store" not in control
    return Freshness(
        ttl_s=min(max(ttl_s, 0.0), max_ttl_s) if is_storable else 0.0,
        is_storable=is_storable,
        etag=headers.get("ETag", ""),
        last_modified=headers.get("Last-Modified", ""),
    )
