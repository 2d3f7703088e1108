"""Transparent pixels over the background that the checkpoint was trained with.

Source: K3 architecture sheet, section 1.3: an 8-pixel chessboard of 255 and 180 that starts bright
at the top left, after the resize. The released code blends in float32 and cuts off, not rounds.
"""

import numpy as np
import numpy.typing as npt
from PIL import Image

from k3text.images.config import Background

BAND_PIXELS = 1 << 20
"""Pixels blended at once; bounds the float32 copies to a few tens of megabytes."""

_FLAT = {"white": 255, "black": 0, "gray": 128}


def composite(picture: Image.Image, background: Background | None) -> Image.Image:
    """Gives an RGB picture without transparency.

    Args:
        picture: RGB, returned as it is, or RGBA.
        background: what shows through; None drops alpha and shows the hidden colours.
    """
    if picture.mode == "RGB":
        return picture
    if background is None:
        return picture.convert("RGB")
    rgba = np.asarray(picture)
    height, width = rgba.shape[:2]
    rgb = np.empty((height, width, 3), dtype=np.uint8)
    rows = max(1, BAND_PIXELS // width)
    for top in range(0, height, rows):
        band = rgba[top : top + rows]
        alpha = band[:, :, 3].astype(np.float32) / np.float32(255)
        shining_through = (1 - alpha) * _behind(background, top, band.shape[0], width)
        for channel in range(3):
            # Stored as bytes, so cut off, as the released code does.
            rgb[top : top + rows, :, channel] = alpha * band[:, :, channel] + shining_through
    return Image.fromarray(rgb)


def _behind(background: Background, top: int, height: int, width: int) -> npt.NDArray[np.uint8]:
    """Rows of the background, grey: [height, width], or one value for a flat one."""
    if background.pattern != "chessboard":
        return np.full((1, 1), _FLAT[background.pattern], dtype=np.uint8)
    y = np.arange(top, top + height)[:, None] // background.square_size
    x = np.arange(width)[None, :] // background.square_size
    is_first_kind = (y + x) % 2 == 0
    is_bright = is_first_kind == background.is_white_top_left
    values = np.array([background.gray_value, background.white_value], dtype=np.uint8)
    return values[is_bright.astype(np.intp)]
