"""Header of WebP. Source: RFC 9649, sections 2.4 to 2.7 and 3.4; RFC 6386, section 9.1."""

import struct

from k3text.images.formats.exif import orientation_of
from k3text.images.formats.stored import MAX_BLOCKS, MAX_FRAMES, Stored
from k3wire.errors import ImageParseError

_LOSSY_START = b"\x9d\x01\x2a"
_LOSSLESS_START = 0x2F
_FIRST_CHUNK = 12


def is_webp(data: bytes) -> bool:
    """Says whether the container is WebP's."""
    return data[:4] == b"RIFF" and data[8:12] == b"WEBP"


def read_webp(data: bytes) -> Stored:
    """Reads the canvas, the orientation and the frames.

    Raises:
        ImageParseError: the first chunk is no picture, or there are far too many chunks.
        struct.error: the data end too early.
    """
    kind = data[_FIRST_CHUNK : _FIRST_CHUNK + 4]
    body = _FIRST_CHUNK + 8
    if kind == b"VP8 ":
        if data[body + 3 : body + 6] != _LOSSY_START:
            raise ImageParseError("The WebP has no picture")
        width, height = struct.unpack_from("<HH", data, body + 6)
        return Stored(width & 0x3FFF, height & 0x3FFF)
    if kind == b"VP8L":
        start, bits = struct.unpack_from("<BI", data, body)
        if start != _LOSSLESS_START:
            raise ImageParseError("The WebP has no picture")
        return Stored((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind == b"VP8X":
        return _read_extended(data, body)
    raise ImageParseError("The WebP has no picture")


def _read_extended(data: bytes, body: int) -> Stored:
    _, width_low, width_high, height_low, height_high = struct.unpack_from("<IHBHB", data, body)
    width = (width_low | width_high << 16) + 1
    height = (height_low | height_high << 16) + 1
    orientation, num_frames = 1, 0
    at = _FIRST_CHUNK
    for _ in range(MAX_BLOCKS):
        if at + 8 > len(data):
            return Stored(width, height, orientation, max(1, num_frames))
        kind, length = struct.unpack_from("<4sI", data, at)
        if kind == b"EXIF":
            orientation = orientation_of(data[at + 8 : at + 8 + length])
        elif kind == b"ANMF":
            num_frames = min(num_frames + 1, MAX_FRAMES)
        # Chunks are padded to an even length.
        at += 8 + length + (length & 1)
    raise ImageParseError("The WebP has too many chunks")
