"""Whether this installation makes the pixels that it should: one built-in picture, checked at start.

The version names codecs and Pillow; this catches a build of the same version that computes something
else, before its patches reach a cache that others read.
"""

import dataclasses
import hashlib
import struct
import zlib

import numpy as np

from k3text.images.config import ProcessorConfig
from k3text.images.processor import process

EXPECTED = "cf2e35e0f6e14bbbbe1046c2073f199c04de0f28280d851e5884ca2ca079dda9"
"""SHA-256 of the picture's patches, little-endian float32. It changes only with `versions.RULES`."""

SIDE = 96
MAX_PATCHES = 16


class SelfCheckError(RuntimeError):
    """This installation makes other pixels than the released processor; stops a start."""


def check_pixels() -> None:
    """Processes the built-in picture: alpha, resize, background, padding, floats.

    Raises:
        SelfCheckError: the patches are not the expected ones.
    """
    config = dataclasses.replace(ProcessorConfig(), max_patches=MAX_PATCHES)
    patches = process(_picture(), config).patches.astype("<f4")
    found = hashlib.sha256(patches.tobytes()).hexdigest()
    if found != EXPECTED:
        raise SelfCheckError(
            "Images come out differently here than they should; install the pinned Pillow"
        )


def _picture() -> bytes:
    """A PNG with colours and alpha in every pixel, written without any image library."""
    y, x = np.mgrid[0:SIDE, 0:SIDE]
    samples = np.stack([x * 5, y * 7, x * y, x + 3 * y], axis=2).astype(np.uint8)
    rows = b"".join(b"\0" + row.tobytes() for row in samples)
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 6, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(rows))
        + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, body: bytes) -> bytes:
    checksum = zlib.crc32(kind + body)
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)
