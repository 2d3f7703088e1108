"""A picture resized and cut into patches, first as bytes, then as the floats that the tower takes.

The two steps are apart because bytes are a quarter as large: they travel and are cached, and floats
are made where they are needed. Both run compiled where a compiler was found at the first use, and
in Pillow and NumPy elsewhere, with the same results. Legend: N patches, C = 3 channels,
P = patch_size.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
from PIL import Image

from k3text.images import numpy_steps
from k3text.images.config import ProcessorConfig
from k3text.images.geometry import Geometry
from k3text.images.native.steps import NativeSteps, native_steps
from k3text.images.native.storage import pixels_in_place
from k3text.images.resampling import are_rows_first, bicubic_taps

CHANNELS = 3
BAND_PIXELS = 1 << 17
"""Pixels cut at once, about; half a megabyte of them stays in a core's cache."""

RESIZED_BAND_PIXELS = 1 << 20
"""Pixels resized at once, about: more of them share the lines at the edges of their bands."""

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def to_patches(
    picture: Image.Image, geometry: Geometry, patch_size: int, out: Bytes | None = None
) -> Bytes:
    """Resizes an RGB picture, pads it with zeros right and below, and cuts it.

    Args:
        picture: RGB.
        geometry: of the picture.
        patch_size: side of a patch, pixels.
        out: flat memory for the patches, at least as long; new memory if None.

    Returns:
        pixels_NCPP: [N, 3, P, P], uint8, row-major over the padded grid; a view of `out`.
    """
    assert picture.mode == "RGB", "patches have three channels"
    _, rows, columns = geometry.grid_thw
    shape = (rows, columns, CHANNELS, patch_size, patch_size)
    size = rows * columns * CHANNELS * patch_size**2
    patches = (np.empty(size, dtype=np.uint8) if out is None else out[:size]).reshape(shape)
    native = native_steps()
    size = (geometry.width, geometry.height)
    is_done = native is not None and _resize_and_cut(native, picture, size, patches)
    if not is_done:
        picture = resize(picture, size)
        if native is None:
            numpy_steps.cut(picture, patches)
        else:
            _cut(native, picture, patches)
    return patches.reshape(-1, *shape[2:])


def resize(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Gives a picture of a size, bicubic: the same picture if it has that size."""
    return picture if picture.size == size else picture.resize(size, Image.Resampling.BICUBIC)


def _resize_and_cut(
    native: NativeSteps, picture: Image.Image, size: tuple[int, int], patches: Bytes
) -> bool:
    """Does both a band at a time, so that no whole resized picture is ever written and read.

    Returns:
        Whether it was done: not for a picture that has that size, nor for one so wide that Pillow
        does not keep even a band of it in one piece.
    """
    if picture.size == size:
        return False
    columns = bicubic_taps(picture.width, size[0])
    lines = bicubic_taps(picture.height, size[1])
    is_rows_first = are_rows_first(picture.size, size)
    rows, _, _, patch_size, _ = patches.shape
    step = max(1, RESIZED_BAND_PIXELS * rows // (picture.width * picture.height))
    for first in range(0, rows, step):
        if first * patch_size >= size[1]:
            # Rows of patches that lie wholly in the padding.
            patches[first:] = 0
            break
        part, top, bottom = lines.between(first * patch_size, (first + step) * patch_size)
        pixels = pixels_in_place(picture.crop((0, top, picture.width, bottom)))
        if pixels is None:
            return False
        native.cut(
            native.resize(pixels, columns, part, is_rows_first), patches[first : first + step]
        )
    return True


def _cut(native: NativeSteps, picture: Image.Image, patches: Bytes) -> None:
    pixels = pixels_in_place(picture)
    if pixels is not None:
        native.cut(pixels, patches)
        return
    rows, columns, _, patch_size, _ = patches.shape
    step = max(1, BAND_PIXELS // (columns * patch_size**2))
    for first in range(0, rows, step):
        top, bottom = first * patch_size, min((first + step) * patch_size, picture.height)
        if top >= bottom:
            # Rows of patches that lie wholly in the padding.
            patches[first:] = 0
            return
        band = picture.crop((0, top, picture.width, bottom))
        pixels = pixels_in_place(band)
        if pixels is None:
            numpy_steps.cut(band, patches[first : first + step])
        else:
            native.cut(pixels, patches[first : first + step])


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
    assert out.flags.c_contiguous, "floats are written one after the other"
    steps = native_steps() or numpy_steps
    steps.look_up(np.ascontiguousarray(pixels_NCPP), _tables(config.mean, config.std), out)
    return out


@lru_cache(maxsize=8)
def _tables(mean: tuple[float, float, float], std: tuple[float, float, float]) -> Floats:
    """The float of every byte, a channel: [3, 256].

    Each step is worked out in float64 and kept in float32, as the released NumPy code does.
    """
    bytes_as_floats = (np.arange(256) / 255.0).astype(np.float32).astype(np.float64)
    centred = (bytes_as_floats - np.array(mean)[:, None]).astype(np.float32)
    return (centred.astype(np.float64) * (1.0 / np.array(std))[:, None]).astype(np.float32)
