"""GIF files written byte by byte, so that they may be what no encoder makes."""

import struct

import numpy as np


def gif_image(indices: np.ndarray, left: int = 0, top: int = 0) -> bytes:
    """An image block whose LZW codes are never longer than nine bits."""
    height, width = indices.shape
    codes: list[int] = []
    for at, value in enumerate(indices.reshape(-1)):
        if at % 200 == 0:
            codes.append(256)
        codes.append(int(value))
    codes.append(257)
    bits = "".join(f"{code:09b}"[::-1] for code in codes)
    bits += "0" * (-len(bits) % 8)
    data = bytes(int(bits[at : at + 8][::-1], 2) for at in range(0, len(bits), 8))
    blocks = b"".join(
        bytes([len(data[at : at + 255])]) + data[at : at + 255] for at in range(0, len(data), 255)
    )
    return b"\x2c" + struct.pack("<HHHHB", left, top, width, height, 0) + b"\x08" + blocks + b"\0"


def raw_gif(width: int, height: int, body: bytes, version: bytes = b"GIF89a") -> bytes:
    greys = bytes(value for value in range(256) for _ in range(3))
    return version + struct.pack("<HHBBB", width, height, 0xF7, 0, 0) + greys + body + b"\x3b"
