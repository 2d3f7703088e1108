"""Cutting and normalising patches with Pillow and NumPy alone: what the compiled steps must equal.

Runs where there is no compiler, at a third of their speed or less.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
from PIL import Image

CHUNK_PATCHES = 128
"""Patches normalised at once, so that their indices stay in a core's cache."""

BAND_ROWS = 8
"""Rows of patches cut at once, so that a band of a large picture stays in a core's cache."""

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def cut(picture: Image.Image, out: Bytes) -> None:
    """Pads an RGB picture with zeros right and below, and cuts it.

    Args:
        picture: no larger than the patches.
        out: [rows, columns, 3, P, P], C-contiguous; wholly written.
    """
    rows, columns, _, patch_size, _ = out.shape
    # A row of a patch is moved as one item: several times as fast as byte by byte.
    strip = np.dtype((np.void, patch_size))
    # A view takes an axis away where the item is one byte.
    target = out.view(strip).reshape(out.shape[:-1])
    for first in range(0, rows, BAND_ROWS):
        last = min(rows, first + BAND_ROWS)
        top, bottom = first * patch_size, min(last * patch_size, picture.height)
        plane = np.zeros(((last - first) * patch_size, columns * patch_size), dtype=np.uint8)
        strips = plane.view(strip).reshape(last - first, patch_size, columns).transpose(0, 2, 1)
        band = picture.crop((0, top, picture.width, max(top, bottom)))
        for channel, values in enumerate(band.split()):
            plane[: band.height, : band.width] = np.asarray(values)
            target[first:last, :, channel] = strips


def look_up(pixels_NCPP: Bytes, tables: Floats, out: Floats) -> None:  # noqa: N803
    """Writes the float of every byte.

    Args:
        pixels_NCPP: [N, 3, P, P], uint8.
        tables: [3, 256], float32: the float of every byte, a channel.
        out: [N, 3, P, P], float32, C-contiguous.
    """
    num_patches, num_channels, height, width = pixels_NCPP.shape
    # Two bytes are looked up at once where their number is even, which halves the work.
    unit = 2 if height * width % 2 == 0 else 1
    wide = _wide_tables(tables.tobytes(), unit)
    shape = (num_patches, len(wide), num_channels // len(wide) * height * width)
    source = np.ascontiguousarray(pixels_NCPP).reshape(shape).view(f"u{unit}")
    target = out.reshape(shape).view(f"u{4 * unit}")
    for start in range(0, num_patches, CHUNK_PATCHES):
        chunk = slice(start, start + CHUNK_PATCHES)
        for index, table in enumerate(wide):
            # Every byte is in range; `clip` only saves the check of it.
            np.take(table, source[chunk, index], out=target[chunk, index], mode="clip")


@lru_cache(maxsize=8)
def _wide_tables(tables: bytes, unit: int) -> tuple[npt.NDArray[np.unsignedinteger], ...]:
    """The floats of `unit` bytes, as one number of so many times 32 bits, a channel.

    One table stands for all channels where they are alike.
    """
    # The order of the bytes in memory, whichever end of a number comes first.
    index = np.arange(256**unit, dtype=f"u{unit}").view(np.uint8).reshape(-1, unit)
    channels = np.frombuffer(tables, dtype=np.float32).reshape(-1, 256)
    if all(channel.tobytes() == channels[0].tobytes() for channel in channels):
        channels = channels[:1]
    return tuple(channel[index].view(f"u{4 * unit}").reshape(-1) for channel in channels)
