"""A picture cut into patches, first as bytes, then as the floats that the vision tower takes.

The two steps are apart because bytes are a quarter as large: they travel and are cached, and floats
are made where they are needed. Legend: N patches, C = 3 channels, P = patch_size.
"""

import numpy as np
import numpy.typing as npt
from PIL import Image

from k3text.images.config import ProcessorConfig
from k3text.images.geometry import Geometry

CHANNELS = 3
CHUNK_PATCHES = 256
"""Patches normalised at once; the table's indices are eight times as large as the bytes."""

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def to_patches(picture: Image.Image, geometry: Geometry, patch_size: int) -> Bytes:
    """Pads a resized RGB picture with zeros right and below, and cuts it.

    Returns:
        pixels_NCPP: [N, 3, P, P], uint8, row-major over the padded grid.
    """
    assert picture.mode == "RGB", "patches have three channels"
    padded = np.zeros((geometry.padded_height, geometry.padded_width, CHANNELS), dtype=np.uint8)
    padded[: geometry.height, : geometry.width] = np.asarray(picture)
    _, rows, columns = geometry.grid_thw
    cut = padded.reshape(rows, patch_size, columns, patch_size, CHANNELS)
    return np.ascontiguousarray(cut.transpose(0, 2, 4, 1, 3)).reshape(
        rows * columns, CHANNELS, patch_size, patch_size
    )


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
    tables = _tables(config)
    for start in range(0, pixels_NCPP.shape[0], CHUNK_PATCHES):
        chunk = slice(start, start + CHUNK_PATCHES)
        for channel in range(CHANNELS):
            out[chunk, channel] = tables[channel][pixels_NCPP[chunk, channel]]
    return out


def _tables(config: ProcessorConfig) -> Floats:
    """The float of each byte: [3, 256].

    Each step is worked out in float64 and kept in float32, as the released NumPy code does.
    """
    bytes_as_floats = (np.arange(256) / 255.0).astype(np.float32)
    tables = np.empty((CHANNELS, 256), dtype=np.float32)
    for channel in range(CHANNELS):
        centred = (bytes_as_floats.astype(np.float64) - config.mean[channel]).astype(np.float32)
        tables[channel] = centred.astype(np.float64) * (1.0 / config.std[channel])
    return tables
