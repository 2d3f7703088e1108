import numpy as np

from k3text.images.config import ProcessorConfig
from k3text.images.patchify import normalise

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
