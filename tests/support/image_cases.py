"""What an image test knows of a file: its bytes, and the picture or the error that it must give.

Legend: H and W are pixels as seen.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]

WIDTH, HEIGHT = 37, 23
"""Of most pictures: odd, unequal, and no multiple of a patch."""


@dataclass(frozen=True)
class ImageCase:
    """One file.

    Attributes:
        name: for test reports.
        data: its bytes.
        code: of the error it must give, or "" if it is a picture.
        rgba: [H, W, 4], what is to be seen, or None where only the size is checked.
        tolerance: largest difference of a channel that lossy codecs or depths may make.
        size: width and height as seen, where `rgba` is None.
        needs_switch: the format is taken only if settings add it.
    """

    name: str
    data: bytes
    code: str = ""
    rgba: Pixels | None = None
    tolerance: int = 0
    size: tuple[int, int] = (0, 0)
    needs_switch: bool = False


def gradient(width: int = WIDTH, height: int = HEIGHT) -> Pixels:
    """A smooth opaque picture whose every turn and mirror is another one: [height, width, 4]."""
    y, x = np.mgrid[0:height, 0:width]
    red = x * 255 // max(1, width - 1)
    green = y * 255 // max(1, height - 1)
    blue = (red + 2 * green) // 3
    return np.stack([red, green, blue, np.full_like(red, 255)], axis=-1).astype(np.uint8)


def levels(num_levels: int, width: int = WIDTH, height: int = HEIGHT) -> npt.NDArray[np.int64]:
    """Numbers below `num_levels` that differ between neighbours: [height, width]."""
    y, x = np.mgrid[0:height, 0:width]
    step = max(1, num_levels // 7)
    return (x * step + y * (step // 2 + 1)) % num_levels


def grey(values: npt.NDArray[np.int64], top: int) -> Pixels:
    """Levels 0 to `top` as opaque grey."""
    scaled = np.rint(values * 255 / top).astype(np.uint8)
    return opaque(np.stack([scaled] * 3, axis=-1))


def opaque(rgb: Pixels) -> Pixels:
    """Adds a full alpha channel."""
    return np.concatenate([rgb, np.full_like(rgb[..., :1], 255)], axis=-1)


def holes(rgba: Pixels, is_hole: npt.NDArray[np.bool_]) -> Pixels:
    """Makes some pixels fully transparent; their colour stays, hidden."""
    found = rgba.copy()
    found[is_hole, 3] = 0
    return found


TURNS: dict[int, Callable[[Pixels], Pixels]] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a, 1),
}
"""What a viewer does for each EXIF orientation. Source: Exif 2.32, section 4.6.4 A."""
