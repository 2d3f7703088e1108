"""The compiled steps give what the NumPy ones give, bit for bit, on any shape."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from k3text.images import patchify
from k3text.images.config import ProcessorConfig
from k3text.images.geometry import plan
from k3text.images.native.steps import native_steps
from k3text.images.native.storage import Pixels, pixels_in_place
from k3text.images.patchify import normalise, to_patches

NATIVE = native_steps()
K3 = ProcessorConfig(version="test")

pytestmark = pytest.mark.skipif(NATIVE is None, reason="no C compiler here")


def noise(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width * 7919 + height).integers(0, 256, (height, width, 3))
    return Image.fromarray(pixels.astype(np.uint8))


def by_numpy(picture: Image.Image, config: ProcessorConfig) -> np.ndarray:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patchify, "native_steps", lambda: None)
        geometry = plan(*picture.size, config)
        # Not zero beforehand: padding has to be written.
        out = np.full(geometry.num_tokens * 4 * 3 * config.patch_size**2, 99, dtype=np.uint8)
        return to_patches(picture, geometry, config.patch_size, out)


@pytest.mark.parametrize("patch", [1, 2, 5, 14, 16, 37])
@pytest.mark.parametrize(("width", "height"), [(1, 1), (13, 29), (28, 28), (29, 57), (200, 3)])
def test_any_size_is_cut_as_by_numpy(patch: int, width: int, height: int) -> None:
    config = replace(K3, patch_size=patch)
    picture = noise(width, height)
    geometry = plan(width, height, config)
    out = np.full(geometry.num_tokens * 4 * 3 * patch**2 + 5, 77, dtype=np.uint8)
    found = to_patches(picture, geometry, patch, out)
    np.testing.assert_array_equal(found, by_numpy(picture, config))
    assert np.shares_memory(found, out)
    np.testing.assert_array_equal(out[-5:], 77)


@pytest.mark.parametrize("height", [1300, 1413, 2801])
def test_a_picture_that_pillow_keeps_in_pieces_is_cut_in_bands(height: int) -> None:
    picture = noise(3001, height)
    assert (pixels_in_place(picture) is None) == (height > 1400)
    found = to_patches(picture, plan(*picture.size, K3), 14)
    np.testing.assert_array_equal(found, by_numpy(picture, K3))


@pytest.mark.parametrize("band_pixels", [1, 3000, 20_000])
def test_bands_do_not_show(band_pixels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = noise(100, 290)
    monkeypatch.setattr(patchify, "BAND_PIXELS", band_pixels)
    monkeypatch.setattr(patchify, "pixels_in_place", whole_is_in_pieces(picture))
    found = to_patches(picture, plan(*picture.size, K3), 14)
    np.testing.assert_array_equal(found, by_numpy(picture, K3))


def whole_is_in_pieces(picture: Image.Image) -> Callable[[Image.Image], Pixels | None]:
    return lambda asked: None if asked is picture else pixels_in_place(asked)


RESIZED = [
    # Wide, square, tall (which is resized in the other order), and one that gets no narrower.
    *((700, 60), (333, 331), (131, 90), (60, 700), (211, 423), (1, 3000), (3000, 1)),
]


@pytest.mark.parametrize("band_pixels", [1, 9000, 1 << 20])
@pytest.mark.parametrize(("width", "height"), RESIZED)
def test_a_picture_is_resized_as_by_pillow(
    width: int, height: int, band_pixels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patchify, "RESIZED_BAND_PIXELS", band_pixels)
    config = replace(K3, max_patches=50, max_patches_a_side=20)
    picture = noise(width, height)
    geometry = plan(width, height, config)
    assert (geometry.width, geometry.height) != picture.size
    # Not zero beforehand: padding has to be written.
    out = np.full(geometry.num_tokens * 4 * 3 * 14**2, 77, dtype=np.uint8)
    found = to_patches(picture, geometry, 14, out)
    np.testing.assert_array_equal(found, by_numpy(picture, config))


def test_a_picture_of_which_no_band_is_in_one_piece_is_resized_by_pillow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    picture = noise(500, 300)
    config = replace(K3, max_patches=50)
    monkeypatch.setattr(patchify, "pixels_in_place", lambda _: None)
    found = to_patches(picture, plan(500, 300, config), 14)
    np.testing.assert_array_equal(found, by_numpy(picture, config))


def test_the_picture_is_read_where_it_lies_and_stays_as_it_was() -> None:
    picture = noise(64, 48)
    before = picture.tobytes()
    pixels = pixels_in_place(picture)
    assert pixels is not None
    assert (pixels.width, pixels.height) == (64, 48)
    to_patches(picture, plan(64, 48, K3), 14)
    assert picture.tobytes() == before


SCALES = [
    ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    ((0.48, 0.45, 0.4), (0.26, 0.25, 0.27)),
    ((0.5, 0.5, 0.3), (0.5, 0.5, 0.5)),
    ((0.5, 0.5, 0.5), (1e300, 1e-300, -0.5)),
]
Triple = tuple[float, float, float]


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("patch", [1, 5, 14])
@pytest.mark.parametrize(("mean", "std"), SCALES)
def test_floats_are_those_of_numpy(
    mean: Triple, std: Triple, patch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(K3, patch_size=patch, mean=mean, std=std)
    # Every byte in every channel, and then some.
    values = np.arange(256 * 3 * patch**2, dtype=np.uint32) // patch**2 // 3
    pixels = values.astype(np.uint8).reshape(256, 3, patch, patch)
    found = normalise(pixels, config)
    monkeypatch.setattr(patchify, "native_steps", lambda: None)
    assert normalise(pixels, config).tobytes() == found.tobytes()
