"""Header of GIF. Source: GIF89a specification, sections 15 to 27."""

import struct

from k3text.images.formats.stored import MAX_FRAMES, Stored
from k3wire.errors import ImageParseError

SIGNATURES = (b"GIF87a", b"GIF89a")
MAX_STEPS = 262_144
"""Blocks and sub-blocks that are walked to count frames; behind them nobody counts."""

_EXTENSION = 0x21
_IMAGE = 0x2C
_TRAILER = 0x3B


def read_gif(data: bytes) -> Stored:
    """Reads the canvas and counts frames.

    The canvas is the logical screen, grown to hold the first frame where that is larger.

    Raises:
        ImageParseError: no frame.
        struct.error: the data end too early.
    """
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + _palette_bytes(flags)
    num_frames = 0
    steps_left = MAX_STEPS
    while at < len(data) and steps_left > 0 and num_frames < MAX_FRAMES:
        steps_left -= 1
        kind = data[at]
        if kind == _TRAILER:
            break
        if kind == _EXTENSION:
            at, steps_left = _skip_sub_blocks(data, at + 2, steps_left)
        elif kind == _IMAGE:
            if at + 10 > len(data):
                break
            left, top, w, h, flags = struct.unpack_from("<HHHHB", data, at + 1)
            if num_frames == 0:
                width, height = max(width, left + w), max(height, top + h)
            num_frames += 1
            at, steps_left = _skip_sub_blocks(data, at + 11 + _palette_bytes(flags), steps_left)
        else:
            at += 1
    if num_frames == 0:
        raise ImageParseError("The GIF has no picture")
    return Stored(width, height, 1, num_frames)


def _palette_bytes(flags: int) -> int:
    return 3 * 2 ** ((flags & 7) + 1) if flags & 0x80 else 0


def _skip_sub_blocks(data: bytes, at: int, steps_left: int) -> tuple[int, int]:
    while at < len(data) and data[at] and steps_left > 0:
        at += 1 + data[at]
        steps_left -= 1
    return at + 1, steps_left
