"""Plain pictures and plain formulas that image tests compare against; none of our image code."""

import io
from typing import Any

import numpy as np
from PIL import Image


def gradient(width: int, height: int) -> np.ndarray:
    """A smooth picture without symmetry: [height, width, 3], uint8."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    red = 255 * x / max(1, width - 1)
    green = 255 * y / max(1, height - 1)
    blue = 128 + 100 * np.sin(0.2 * x + 0.1 * y)
    return np.rint(np.stack([red, green, blue], axis=2)).astype(np.uint8)


def stored_for(upright: np.ndarray, orientation: int) -> np.ndarray:
    """How a camera stores a picture whose EXIF orientation says how to undo it."""
    match orientation:
        case 2:
            return upright[:, ::-1]
        case 3:
            return upright[::-1, ::-1]
        case 4:
            return upright[::-1]
        case 5:
            return upright.swapaxes(0, 1)
        case 6:
            return np.rot90(upright, 1)
        case 7:
            return np.rot90(upright, 2).swapaxes(0, 1)
        case 8:
            return np.rot90(upright, -1)
        case _:
            return upright


def over_chessboard(rgba: np.ndarray) -> np.ndarray:
    """K3's background behind a picture, pixel by pixel in float32: [height, width, 3], uint8."""
    height, width, _ = rgba.shape
    out = np.zeros((height, width, 3), dtype=np.uint8)
    for y in range(height):
        for x in range(width):
            behind = np.float32(255 if (y // 8 + x // 8) % 2 == 0 else 180)
            alpha = np.float32(rgba[y, x, 3]) / np.float32(255)
            for c in range(3):
                value = alpha * np.float32(rgba[y, x, c]) + (np.float32(1) - alpha) * behind
                out[y, x, c] = int(value)
    return out


def encode(picture: np.ndarray | Image.Image, form: str, **options: Any) -> bytes:
    """Encodes with Pillow."""
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def exif_block(orientation: int, order: str = "<", kind: int = 3) -> bytes:
    """A minimal EXIF block: one directory with one entry."""
    pack = {"<": b"II", ">": b"MM"}[order]
    value = orientation.to_bytes(2, "little" if order == "<" else "big") + b"\0\0"
    if kind == 4:
        value = orientation.to_bytes(4, "little" if order == "<" else "big")
    number = lambda n, size: n.to_bytes(size, "little" if order == "<" else "big")  # noqa: E731
    entry = number(0x0112, 2) + number(kind, 2) + number(1, 4) + value
    return pack + number(42, 2) + number(8, 4) + number(1, 2) + entry + number(0, 4)


def reassemble(pixels: np.ndarray, grid_thw: tuple[int, int, int]) -> np.ndarray:
    """The padded picture that patches [N, 3, P, P] were cut from: [height, width, 3]."""
    _, grid_height, grid_width = grid_thw
    size = pixels.shape[2]
    out = np.zeros((grid_height * size, grid_width * size, 3), dtype=pixels.dtype)
    for index, patch in enumerate(pixels):
        top, left = divmod(index, grid_width)
        for channel in range(3):
            out[top * size : (top + 1) * size, left * size : (left + 1) * size, channel] = patch[
                channel
            ]
    return out
