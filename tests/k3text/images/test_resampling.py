"""Weights and starts make Pillow's own pixels, along either axis and in either order."""

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from k3text.images.resampling import WEIGHT_BITS, Taps, are_rows_first, bicubic_taps

Bytes = npt.NDArray[np.uint8]


def made_lower(pixels: Bytes, rows: Taps) -> Bytes:
    """The formula as it is written down, a line at a time."""
    lines: list[npt.NDArray[np.int64]] = []
    for start, weights in zip(rows.starts, rows.weights, strict=True):
        wide = pixels[start : start + len(weights)].astype(np.int64)
        total = np.tensordot(weights.astype(np.int64), wide, axes=1)
        lines.append(np.clip((total + (1 << WEIGHT_BITS - 1)) >> WEIGHT_BITS, 0, 255))
    return np.stack(lines).astype(np.uint8)


def made_narrower(pixels: Bytes, columns: Taps) -> Bytes:
    return made_lower(pixels.swapaxes(0, 1), columns).swapaxes(0, 1)


def noise(width: int, height: int) -> Bytes:
    generator = np.random.default_rng(width * 7919 + height)
    # Only black and white: every sum overshoots somewhere, so that it has to be kept within a byte.
    return generator.integers(0, 2, (height, width, 3)).astype(np.uint8) * 255


SHAPES = [
    ((1, 1), (1, 1)),
    ((5, 4), (1, 1)),
    ((7, 300), (7, 20)),
    ((64, 64), (63, 64)),
    ((100, 80), (73, 58)),
    ((300, 7), (20, 1)),
    ((40, 90), (30, 67)),
    ((2, 201), (2, 100)),
    ((2, 201), (1, 200)),
    ((90, 40), (89, 38)),
    ((30, 20), (40, 50)),
]


@pytest.mark.parametrize(("size", "new_size"), SHAPES)
def test_taps_make_pillows_pixels(size: tuple[int, int], new_size: tuple[int, int]) -> None:
    pixels = noise(*size)
    expected = np.asarray(Image.fromarray(pixels).resize(new_size, Image.Resampling.BICUBIC))
    columns, rows = (bicubic_taps(*pair) for pair in zip(size, new_size, strict=True))
    if are_rows_first(size, new_size):
        found = made_narrower(made_lower(pixels, rows), columns)
    else:
        found = made_lower(made_narrower(pixels, columns), rows)
    np.testing.assert_array_equal(found, expected)


def test_the_order_shows_so_that_the_right_one_is_proven() -> None:
    size, new_size = (40, 90), (30, 67)
    assert are_rows_first(size, new_size)
    columns, rows = (bicubic_taps(*pair) for pair in zip(size, new_size, strict=True))
    pixels = noise(*size)
    one = made_narrower(made_lower(pixels, rows), columns)
    assert (one != made_lower(made_narrower(pixels, columns), rows)).any()


@pytest.mark.parametrize(("size", "new_size"), [(1, 1), (5, 2), (1000, 733), (90, 1), (7, 9)])
def test_no_tap_lies_outside_the_source(size: int, new_size: int) -> None:
    taps = bicubic_taps(size, new_size)
    assert taps.starts.min() >= 0
    assert (np.diff(taps.starts) >= 0).all()
    assert taps.starts[-1] + taps.weights.shape[1] <= size


def test_a_part_counts_from_its_own_first_pixel() -> None:
    taps = bicubic_taps(1000, 733)
    part, top, bottom = taps.between(100, 128)
    pixels = noise(3, 1000)
    np.testing.assert_array_equal(
        made_lower(pixels[top:bottom], part), made_lower(pixels, taps)[100:128]
    )
