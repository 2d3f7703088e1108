"""Which pixels make each pixel of a resized picture, and with what weights: Pillow's bicubic filter.

Pillow resizes 8-bit pictures with integers, so that its pixels can be made again bit for bit: a
pixel is the sum of byte times weight, plus a half, shifted right by `WEIGHT_BITS` and kept within 0
to 255, first along one axis and then along the other.

Source: Pillow 13.0.0, src/libImaging/Resample.c (precompute_coeffs, normalize_coeffs_8bpc,
ImagingResampleInner). The order of every operation is theirs.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

WEIGHT_BITS = 22
SUPPORT = 2.0
"""Pixels that the filter reaches to either side, on the scale of the smaller picture."""

Integers = npt.NDArray[np.int32]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Taps:
    """How the pixels along one axis are made.

    Attributes:
        starts: [n], int32: the first source pixel of each; never falls from one to the next.
        weights: [n, taps], int32, C-contiguous: of that pixel and those after it, all of which
            exist.
    """

    starts: Integers
    weights: Integers

    def between(self, first: int, last: int) -> tuple["Taps", int, int]:
        """Gives the part for some pixels, and which source pixels it needs.

        Args:
            first: of the resized picture.
            last: the one behind the last; at least one pixel lies before it.

        Returns:
            the part, counted from its own first source pixel; that pixel; the one behind its last.
        """
        starts = self.starts[first:last]
        top, bottom = int(starts[0]), int(starts[-1]) + self.weights.shape[1]
        return Taps(starts - np.int32(top), self.weights[first:last]), top, bottom


def bicubic_taps(size: int, new_size: int) -> Taps:
    """Works out the weights along one axis.

    Args:
        size: pixels of the source, at least 1.
        new_size: pixels of the result, at least 1.
    """
    scale = size / new_size
    reach = max(scale, 1.0)
    centres = (np.arange(new_size) + 0.5) * scale
    # Conversion to integers cuts off towards zero, as in C.
    lowest = np.maximum((centres - SUPPORT * reach + 0.5).astype(np.int64), 0)
    ends = np.minimum((centres + SUPPORT * reach + 0.5).astype(np.int64), size)
    num_taps = int((ends - lowest).max())
    sources = lowest[:, None] + np.arange(num_taps)
    weights = _bicubic((sources - centres[:, None] + 0.5) * (1.0 / reach))
    weights[sources >= ends[:, None]] = 0.0
    totals = np.zeros(new_size)
    for column in weights.T:
        # One after the other: another order of additions can give another last bit.
        totals += column
    scaled = weights / totals[:, None] * (1 << WEIGHT_BITS)
    rounded = np.trunc(np.where(scaled < 0, scaled - 0.5, scaled + 0.5)).astype(np.int32)
    return _within(size, lowest, rounded)


def _bicubic(x: Doubles) -> Doubles:
    x = np.abs(x)
    near = ((1.5 * x - 2.5) * x) * x + 1
    far = (((x - 5) * x + 8) * x - 4) * -0.5
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _within(size: int, lowest: npt.NDArray[np.int64], weights: Integers) -> Taps:
    """Moves the last starts back, and their weights on, so that no tap lies behind the source."""
    num_pixels, num_taps = weights.shape
    starts = np.minimum(lowest, size - num_taps)
    moved = np.zeros((num_pixels, 2 * num_taps), dtype=np.int32)
    places = (lowest - starts)[:, None] + np.arange(num_taps)
    np.put_along_axis(moved, places, weights, axis=1)
    return Taps(starts.astype(np.int32), np.ascontiguousarray(moved[:, :num_taps]))


def are_rows_first(size: tuple[int, int], new_size: tuple[int, int]) -> bool:
    """Whether Pillow makes a picture lower before it makes it narrower, which rounds differently.

    Args:
        size: width and height of the source.
        new_size: of the result.
    """
    (width, height), (new_width, new_height) = size, new_size
    return height - new_height > max(0, (width - new_width) * 2)
