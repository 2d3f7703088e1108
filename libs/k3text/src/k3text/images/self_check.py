"""Whether this installation makes the pixels that it should: built-in pictures, checked at start.

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

EXPECTED = {
    (96, 96, 4): "cf2e35e0f6e14bbbbe1046c2073f199c04de0f28280d851e5884ca2ca079dda9",
    (160, 90, 3): "2a5765c9bf41071121bfbc9c7a17542e8a652a432aeab623d47e9b0362303b2c",
    (40, 200, 3): "83955c4ba4805a9363b0fc12d73aa6c242b73aef8cd87b3caa690303b4e9e158",
}
"""Width, height and channels of each picture, and the SHA-256 of its patches, little-endian float32:
one with alpha, an opaque one, and one so tall that it is resized in the other order. They change only
with `versions.RULES`."""

MAX_PATCHES = 16


class SelfCheckError(RuntimeError):
    """This installation makes other pixels than the released processor; stops a start."""


def check_pixels() -> None:
    """Processes the built-in pictures: alpha, resize, background, padding, floats.

    Raises:
        SelfCheckError: the patches are not the expected ones.
    """
    config = dataclasses.replace(ProcessorConfig(), max_patches=MAX_PATCHES)
    for (width, height, num_channels), expected in EXPECTED.items():
        patches = process(_picture(width, height, num_channels), config).patches.astype("<f4")
        if hashlib.sha256(patches.tobytes()).hexdigest() != expected:
            raise SelfCheckError(
                "Images come out differently here than they should; install the pinned Pillow"
            )


def _picture(width: int, height: int, num_channels: int) -> bytes:
    """A PNG with colours, and alpha if it is the fourth, in every pixel; by no image library."""
    y, x = np.mgrid[0:height, 0:width]
    channels = [x * 5, y * 7, x * y, x + 3 * y][:num_channels]
    samples = np.stack(channels, axis=2).astype(np.uint8)
    rows = b"".join(b"\0" + row.tobytes() for row in samples)
    colour_type = 6 if num_channels == 4 else 2
    header = struct.pack(">IIBBBBB", width, height, 8, colour_type, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(rows))
        + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, body: bytes) -> bytes:
    checksum = zlib.crc32(kind + body)
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)
