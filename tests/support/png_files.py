"""PNG files written by hand: every colour type, depth and interlacing, right or wrong on purpose."""

import struct
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

SIGNATURE = b"\x89PNG\r\n\x1a\n"

GREY, RGB, PALETTE, GREY_ALPHA, RGB_ALPHA = 0, 2, 3, 4, 6
DEPTHS = {
    GREY: (1, 2, 4, 8, 16),
    RGB: (8, 16),
    PALETTE: (1, 2, 4, 8),
    GREY_ALPHA: (8, 16),
    RGB_ALPHA: (8, 16),
}
"""Source: PNG, third edition, table 8."""

_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))  # fmt: skip
"""First column and row, and steps, of each pass. Source: PNG, third edition, section 8.2."""

Samples = npt.NDArray[np.int64]


def chunk(kind: bytes, body: bytes, crc: int | None = None) -> bytes:
    """One chunk; `crc` replaces the right checksum."""
    found = zlib.crc32(kind + body) if crc is None else crc
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", found)


def header(
    width: int, height: int, depth: int, colour_type: int, *, is_interlaced: bool = False
) -> bytes:
    """The IHDR chunk."""
    body = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, int(is_interlaced))
    return chunk(b"IHDR", body)


def file(*chunks: bytes) -> bytes:
    """A file of chunks, ended properly."""
    return SIGNATURE + b"".join(chunks) + chunk(b"IEND", b"")


def png(
    samples_HWC: Samples,  # noqa: N803
    depth: int,
    colour_type: int,
    *,
    is_interlaced: bool = False,
    before: Sequence[bytes] = (),
) -> bytes:
    """A file of samples, [height, width, channels]; `before` are chunks ahead of the pixels."""
    height, width = samples_HWC.shape[:2]
    first = header(width, height, depth, colour_type, is_interlaced=is_interlaced)
    pixels = chunk(b"IDAT", zlib.compress(scan_lines(samples_HWC, depth, is_interlaced)))
    return file(first, *before, pixels)


def scan_lines(samples_HWC: Samples, depth: int, is_interlaced: bool = False) -> bytes:  # noqa: N803
    """The unfiltered bytes of all passes."""
    if not is_interlaced:
        return _lines(samples_HWC, depth)
    passes = (samples_HWC[y::down, x::right] for x, y, right, down in _ADAM7)
    return b"".join(_lines(part, depth) for part in passes if part.size)


def _lines(samples: Samples, depth: int) -> bytes:
    lines: list[bytes] = []
    for row in samples:
        flat = row.reshape(-1)
        if depth == 16:
            packed = flat.astype(">u2").tobytes()
        else:
            bits = flat[:, None] >> np.arange(depth - 1, -1, -1) & 1
            packed = np.packbits(bits.reshape(-1).astype(np.uint8)).tobytes()
        lines.append(b"\0" + packed)
    return b"".join(lines)
