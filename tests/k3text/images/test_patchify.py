from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from k3text.images.config import ProcessorConfig
from k3text.images.geometry import plan
from k3text.images.patchify import normalise, to_patches

K3 = ProcessorConfig(version="test")


def test_every_byte_has_the_float_that_the_released_numpy_steps_give() -> None:
    values = np.arange(256, dtype=np.uint8)
    pixels = np.zeros((2, 3, 14, 14), np.uint8)
    pixels.reshape(-1)[:256] = values
    steps = (values / 255.0).astype(np.float32)
    steps -= np.array(0.5)
    steps *= np.array(1 / 0.5)
    found = normalise(pixels, K3).reshape(-1)[:256]
    assert found.tobytes() == steps.tobytes()
    assert found[0] == -1.0
    assert found[255] == 1.0


def test_chunks_do_not_show() -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (700, 3, 14, 14), dtype=np.uint8)
    whole = normalise(pixels, K3)
    np.testing.assert_array_equal(whole, np.concatenate([normalise(p[None], K3) for p in pixels]))


def test_floats_can_be_made_in_memory_of_the_caller() -> None:
    pixels = np.random.default_rng(4).integers(0, 256, (5, 3, 14, 14), dtype=np.uint8)
    out = np.empty(pixels.shape, np.float32)
    assert normalise(pixels, K3, out) is out
    np.testing.assert_array_equal(out, normalise(pixels, K3))


@pytest.mark.parametrize("patch", [1, 3, 5, 14, 16])
def test_any_patch_size_and_any_mean_follow_the_plain_steps(patch: int) -> None:
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    config = replace(K3, patch_size=patch, mean=mean, std=std)
    pixels = np.random.default_rng(5).integers(0, 256, (260, 3, patch, patch), dtype=np.uint8)
    steps = (pixels / 255.0).astype(np.float32)
    steps = (steps.astype(np.float64) - np.reshape(mean, (3, 1, 1))).astype(np.float32)
    steps = (steps.astype(np.float64) * (1.0 / np.reshape(std, (3, 1, 1)))).astype(np.float32)
    np.testing.assert_array_equal(normalise(pixels, config), steps)
    # Patches that do not lie side by side are read all the same.
    np.testing.assert_array_equal(normalise(pixels[::3], config), steps[::3])


@pytest.mark.parametrize("patch", [1, 5, 14])
def test_patches_are_the_squares_of_the_padded_picture(patch: int) -> None:
    config = replace(K3, patch_size=patch)
    # More rows of patches than one band has.
    width, height = 3 * patch + 1, 17 * patch + 1
    rgb = np.random.default_rng(6).integers(0, 256, (height, width, 3), dtype=np.uint8)
    geometry = plan(width, height, config)
    padded = np.zeros((geometry.padded_height, geometry.padded_width, 3), np.uint8)
    padded[:height, :width] = rgb
    found = to_patches(Image.fromarray(rgb), geometry, patch)
    _, rows, columns = geometry.grid_thw
    assert found.shape == (rows * columns, 3, patch, patch)
    for index, square in enumerate(found):
        y, x = (side * patch for side in divmod(index, columns))
        expected = padded[y : y + patch, x : x + patch].transpose(2, 0, 1)
        np.testing.assert_array_equal(square, expected)
