"""Header of PNG and APNG. Source: PNG, third edition (W3C), sections 5 and 11."""

import struct

from k3text.images.formats.exif import orientation_of
from k3text.images.formats.stored import MAX_BLOCKS, MAX_FRAMES, Stored
from k3wire.errors import ImageParseError

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def read_png(data: bytes) -> Stored:
    """Reads size, orientation and frames; EXIF may also stand behind the pixels.

    Raises:
        ImageParseError: no header chunk, or far too many chunks.
        struct.error: the data end too early.
    """
    length, kind, width, height = struct.unpack_from(">I4sII", data, len(SIGNATURE))
    if kind != b"IHDR" or length != 13:
        raise ImageParseError("The PNG has no header")
    orientation, num_frames = 1, 1
    at = len(SIGNATURE)
    for _ in range(MAX_BLOCKS):
        if at + 8 > len(data):
            return Stored(width, height, orientation, num_frames)
        length, kind = struct.unpack_from(">I4s", data, at)
        body = at + 8
        if kind == b"eXIf":
            orientation = orientation_of(data[body : body + length])
        elif kind == b"acTL":
            (num_frames,) = struct.unpack_from(">I", data, body)
            num_frames = max(1, min(num_frames, MAX_FRAMES))
        elif kind == b"IEND":
            return Stored(width, height, orientation, num_frames)
        at = body + length + 4
    raise ImageParseError("The PNG has too many chunks")
