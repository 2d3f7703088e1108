"""PNG files of every colour type, bit depth and interlacing, written from samples, chunk by chunk."""

import struct
import zlib

import numpy as np

SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))  # fmt: skip


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def header(width: int, height: int, depth: int, colour: int, interlaced: bool = False) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced))


def rows(samples: np.ndarray, depth: int) -> bytes:
    """Filter type 0 rows of [height, width, channels] samples."""
    out = b""
    for row in samples:
        flat = row.reshape(-1)
        if depth == 16:
            out += b"\0" + flat.astype(">u2").tobytes()
        elif depth == 8:
            out += b"\0" + flat.astype(np.uint8).tobytes()
        else:
            bits = (flat[:, None] >> np.arange(depth - 1, -1, -1)) & 1
            out += b"\0" + np.packbits(bits.astype(np.uint8)).tobytes()
    return out


def raw_png(
    samples: np.ndarray,
    depth: int,
    colour: int,
    *,
    interlaced: bool = False,
    before: bytes = b"",
    after: bytes = b"",
) -> bytes:
    """A PNG.

    Args:
        samples: [height, width, channels], whole numbers below 2 ** depth.
        depth: bits of a sample.
        colour: the standard's colour type.
        interlaced: with Adam7.
        before: chunks between header and pixels, a palette for one.
        after: chunks between pixels and end.
    """
    height, width, channels = samples.shape
    assert channels == CHANNELS[colour]
    if interlaced:
        data = b"".join(
            rows(samples[y::dy, x::dx], depth)
            for x, y, dx, dy in ADAM7
            if samples[y::dy, x::dx].size
        )
    else:
        data = rows(samples, depth)
    return (
        SIGNATURE
        + header(width, height, depth, colour, interlaced)
        + before
        + chunk(b"IDAT", zlib.compress(data))
        + after
        + chunk(b"IEND", b"")
    )
