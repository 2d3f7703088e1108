"""Pictures in a JSON text, taken out of it before it is decoded.

A decoder holds the interpreter from the first byte to the last, and with it every other request.
What is long in a chat request is data URLs, each one string: they are cut out, decoded one by one,
and put back by name into the values of what is left, which is short.
"""

import secrets
from dataclasses import dataclass, field

LONG_STRING_BYTES = 64 * 1024
"""Data URLs from this length on are cut out."""

MAX_CUTS = 1024
"""Long data URLs that are cut out; any further ones stay in the text."""

MAX_LOOKS = 65_536
"""Places that are looked at. Most are no picture: logs of event streams are full of them."""

_OPENING = b'"data:'


@dataclass(frozen=True, slots=True)
class CutText:
    """A JSON text without its long data URLs.

    Attributes:
        text: with a name in place of each.
        prefix: with which these names begin; nobody can guess it. Never empty.
        spans: by name: from the opening quote to behind the closing one.
    """

    text: bytes | bytearray
    prefix: str
    spans: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])


def cut_long_strings(body: bytes | bytearray) -> CutText:
    """Cuts long data URLs out of a JSON text; of one that is no JSON, the rest is none either."""
    prefix = secrets.token_hex(16)
    spans: dict[str, tuple[int, int]] = {}
    pieces: list[bytes | bytearray] = []
    done = at = 0
    for _ in range(MAX_LOOKS):
        at = body.find(_OPENING, at)
        end = body.find(b'"', at + 1) + 1
        if at < 0 or end == 0 or len(spans) == MAX_CUTS:
            break
        # A quote behind a backslash opens and closes nothing: it stands within a string.
        is_whole = body[at - 1 : at] != b"\\" and body[end - 2 : end - 1] != b"\\"
        if end - at < LONG_STRING_BYTES or not is_whole:
            at += len(_OPENING)
            continue
        name = f"{prefix}:{len(spans)}"
        pieces += (body[done:at], f'"{name}"'.encode())
        spans[name] = (at, end)
        done = at = end
    if not spans:
        return CutText(text=body, prefix=prefix)
    pieces.append(body[done:])
    return CutText(text=b"".join(pieces), prefix=prefix, spans=spans)
