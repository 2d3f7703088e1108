"""Header of JPEG. Source: ITU-T T.81, annex B; Exif 2.32, section 4.7."""

import struct

from k3text.images.formats.exif import PREFIX, orientation_of
from k3text.images.formats.stored import MAX_BLOCKS, Stored
from k3wire.errors import ImageParseError

SIGNATURE = b"\xff\xd8\xff"

_START_OF_SCAN = 0xDA
_END = 0xD9
_APP1 = 0xE1
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_BARE = frozenset({0x01, *range(0xD0, 0xD8)})


def read_jpeg(data: bytes) -> Stored:
    """Reads size and orientation: the segments up to the first scan.

    Raises:
        ImageParseError: no frame before the first scan, or far too many segments.
        struct.error: the data end too early.
    """
    size: tuple[int, int] | None = None
    orientation: int | None = None
    at = 2
    for _ in range(MAX_BLOCKS):
        at, marker = _next_marker(data, at)
        if marker in (_START_OF_SCAN, _END):
            break
        if marker in _BARE:
            continue
        (length,) = struct.unpack_from(">H", data, at)
        body = at + 2
        if marker in _FRAMES:
            _, height, width = struct.unpack_from(">BHH", data, body)
            size = size or (width, height)
        elif marker == _APP1 and orientation is None and data[body : body + 6] == PREFIX:
            orientation = orientation_of(data[body : at + length])
        at += max(length, 2)
    else:
        raise ImageParseError("The JPEG has too many segments")
    if size is None:
        raise ImageParseError("The JPEG has no picture")
    return Stored(*size, orientation or 1)


def _next_marker(data: bytes, at: int) -> tuple[int, int]:
    """Finds the next marker, over any fill bytes; gives the place behind it and its code."""
    start = data.find(b"\xff", at)
    if start < 0:
        raise ImageParseError("The JPEG ends before its picture")
    while start < len(data) and data[start] == 0xFF:
        start += 1
    if start >= len(data):
        raise ImageParseError("The JPEG ends before its picture")
    return start + 1, data[start]
