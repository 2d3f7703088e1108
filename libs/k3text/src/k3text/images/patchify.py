"""A picture cut into patches, first as bytes, then as the floats that the vision tower takes.

The two steps are apart because bytes are a quarter as large: they travel and are cached, and floats
are made where they are needed. Legend: N patches, C = 3 channels, P = patch_size.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
from PIL import Image

from k3text.images.config import ProcessorConfig
from k3text.images.geometry import Geometry

CHANNELS = 3
CHUNK_PATCHES = 128
"""Patches normalised at once, so that their indices stay in a core's cache."""

BAND_ROWS = 8
"""Rows of patches cut at once, so that a band of a large picture stays in a core's cache."""

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def to_patches(picture: Image.Image, geometry: Geometry, patch_size: int) -> Bytes:
    """Pads a resized RGB picture with zeros right and below, and cuts it.

    Returns:
        pixels_NCPP: [N, 3, P, P], uint8, row-major over the padded grid.
    """
    assert picture.mode == "RGB", "patches have three channels"
    _, rows, columns = geometry.grid_thw
    # A row of a patch is moved as one item: several times as fast as byte by byte.
    strip = np.dtype((np.void, patch_size))
    cut = np.empty((rows, columns, CHANNELS, patch_size), dtype=strip)
    for first in range(0, rows, BAND_ROWS):
        last = min(rows, first + BAND_ROWS)
        top, bottom = first * patch_size, min(last * patch_size, picture.height)
        plane = np.zeros(((last - first) * patch_size, geometry.padded_width), dtype=np.uint8)
        strips = plane.view(strip).reshape(last - first, patch_size, columns).transpose(0, 2, 1)
        band = picture.crop((0, top, picture.width, max(top, bottom)))
        for channel, values in enumerate(band.split()):
            plane[: band.height, : band.width] = np.asarray(values)
            cut[first:last, :, channel] = strips
    return cut.view(np.uint8).reshape(rows * columns, CHANNELS, patch_size, patch_size)


def normalise(pixels_NCPP: Bytes, config: ProcessorConfig, out: Floats | None = None) -> Floats:  # noqa: N803
    """Turns bytes into floats: (value / 255 - mean) / std, a channel.

    Args:
        pixels_NCPP: [N, 3, P, P], uint8.
        config: with mean and std.
        out: [N, 3, P, P], float32, C-contiguous; a new array if None.

    Returns:
        `out`.
    """
    if out is None:
        out = np.empty(pixels_NCPP.shape, dtype=np.float32)
    assert out.flags.c_contiguous, "floats are written through a view"
    num_patches, _, height, width = pixels_NCPP.shape
    # Two bytes are looked up at once where their number is even, which halves the work.
    unit = 2 if height * width % 2 == 0 else 1
    tables = _tables(config, unit)
    shape = (num_patches, len(tables), CHANNELS // len(tables) * height * width)
    source = np.ascontiguousarray(pixels_NCPP).reshape(shape).view(f"u{unit}")
    target = out.reshape(shape).view(f"u{4 * unit}")
    for start in range(0, num_patches, CHUNK_PATCHES):
        chunk = slice(start, start + CHUNK_PATCHES)
        for index, table in enumerate(tables):
            # Every byte is in range; `clip` only saves the check of it.
            np.take(table, source[chunk, index], out=target[chunk, index], mode="clip")
    return out


@lru_cache(maxsize=8)
def _tables(config: ProcessorConfig, unit: int) -> tuple[npt.NDArray[np.unsignedinteger], ...]:
    """The floats of `unit` bytes, as one number of so many times 32 bits, a channel.

    One table stands for all channels where they are alike. Each step is worked out in float64 and
    kept in float32, as the released NumPy code does.
    """
    bytes_as_floats = (np.arange(256) / 255.0).astype(np.float32)
    channels = list(zip(config.mean, config.std, strict=True))
    tables: list[npt.NDArray[np.unsignedinteger]] = []
    for mean, std in channels[:1] if len(set(channels)) == 1 else channels:
        centred = (bytes_as_floats.astype(np.float64) - mean).astype(np.float32)
        table = (centred.astype(np.float64) * (1.0 / std)).astype(np.float32)
        # The order of the bytes in memory, whichever end of a number comes first.
        index = np.arange(256**unit, dtype=f"u{unit}").view(np.uint8).reshape(-1, unit)
        tables.append(table[index].view(f"u{4 * unit}").reshape(-1))
    return tuple(tables)
