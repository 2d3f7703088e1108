"""The text between a marker and its separator: a tag's name and attributes."""

import re
from dataclasses import dataclass, field

KNOWN_TAGS = ("message", "think", "response", "tools", "call", "argument", "json")
"""Tags that K3 writes."""

LONG_TAGS = ("message", "call", "argument", "json")
"""Tags with attributes, which may be of any length."""

MAX_SHORT_HEADER_BYTES = 64
"""Past this, what follows a marker is a tag with attributes, or text behind a stray marker."""

_TAG = re.compile(r'\s*([A-Za-z_][\w.-]*)((?:\s+[^\s="]+\s*=\s*"[^"]*")*)\s*')
_ATTRIBUTE = re.compile(r'([^\s="]+)\s*=\s*"([^"]*)"')


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag as written by the model.

    Attributes:
        name: without the whitespace around it.
        attributes: values unescaped; of a repeated key the first.
    """

    name: str
    attributes: dict[str, str] = field(default_factory=dict[str, str])


def parse_tag(header: bytes | bytearray) -> Tag | None:
    """Reads a header.

    Args:
        header: the bytes between marker and separator.

    Returns:
        the tag, or None if this is no tag but text.
    """
    text = header.decode("utf-8", "replace")
    match = _TAG.fullmatch(text)
    if match is None:
        return None
    attributes: dict[str, str] = {}
    for key, value in _ATTRIBUTE.findall(match.group(2)):
        attributes.setdefault(key, unescape_attribute(value))
    return Tag(match.group(1), attributes)


def may_be_long(header: bytes | bytearray) -> bool:
    """Says whether a header past the short limit may go on: its name is whole and takes attributes."""
    words = header.split(maxsplit=1)
    return len(words) > 1 and words[0].decode("utf-8", "replace") in LONG_TAGS


def may_become_tag(header: bytes | bytearray) -> bool:
    """Says whether a header without its separator is the beginning of a known tag."""
    stripped = header.lstrip()
    words = stripped.split(maxsplit=1)
    if not words:
        return True
    word = words[0].decode("utf-8", "replace")
    if len(words) > 1 or len(words[0]) < len(stripped):
        return word in KNOWN_TAGS
    return any(name.startswith(word) for name in KNOWN_TAGS)


def unescape_attribute(value: str) -> str:
    """Undoes the escapes of an attribute: the double quote first, then `&`."""
    return value.replace("&quot;", '"').replace("&amp;", "&")
