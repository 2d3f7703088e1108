import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3text.images.config import ProcessorConfig
from k3text.images.geometry import grid, num_tokens, plan

K3 = ProcessorConfig(version="test")

# Width, height and pad tokens, of squares and of what people send.
# Source: the published rule, worked out apart from this code.
TOKENS = [
    (1, 1, 1),
    (28, 28, 1),
    (29, 29, 4),
    (224, 224, 64),
    (512, 512, 361),
    (1024, 768, 1036),
    (1024, 1024, 1369),
    (1920, 1080, 2691),
    (2000, 2000, 5184),
    (3840, 2160, 10_764),
    (4096, 4096, 16_641),
    (8192, 8192, 16_384),
    (1, 10_000, 256),
    (20_000, 20, 256),
    (1861, 7041, 16_817),
]

SIDES = st.one_of(st.integers(1, 400), st.integers(1, 65_535))


@pytest.mark.parametrize(("width", "height", "tokens"), TOKENS)
def test_pre_11_an_image_costs_the_tokens_of_the_published_rule(
    width: int, height: int, tokens: int
) -> None:
    assert num_tokens(width, height, K3) == tokens
    assert num_tokens(height, width, K3) == tokens


def test_pre_11_a_long_thin_image_shrinks_on_both_sides() -> None:
    found = plan(20_000, 20, K3)
    assert (found.width, found.height) == (7168, 7)
    assert (found.padded_width, found.padded_height) == (7168, 28)
    assert found.grid_thw == grid(20_000, 20, K3) == (1, 2, 512)


@given(SIDES, SIDES)
def test_pre_11_every_plan_keeps_the_limits(width: int, height: int) -> None:
    found = plan(width, height, K3)
    assert 1 <= found.width <= min(width, 7168)
    assert 1 <= found.height <= min(height, 7168)
    for side, padded in ((found.width, found.padded_width), (found.height, found.padded_height)):
        assert padded % 28 == 0
        assert 0 <= padded - side < 28
    assert max(1, found.width // 14) * max(1, found.height // 14) <= 65_536
    frames, rows, columns = found.grid_thw
    assert (frames, rows * 14, columns * 14) == (1, found.padded_height, found.padded_width)
    assert found.num_tokens * 4 == rows * columns
    assert found.num_tokens <= 16_817


@given(SIDES, SIDES)
def test_an_image_within_the_limits_is_not_resized(width: int, height: int) -> None:
    fits = max(width, height) <= 7168 and (width // 14) * (height // 14) <= 65_536
    found = plan(width, height, K3)
    assert ((found.width, found.height) == (width, height)) == fits


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 20), st.integers(1, 3))
def test_any_rule_keeps_its_own_limits(width: int, height: int, patch: int, merge: int) -> None:
    config = replace(K3, patch_size=patch, merge_size=merge, max_patches=900, max_patches_a_side=40)
    found = plan(width, height, config)
    assert max(found.width, found.height) <= 40 * patch
    # The rule scales by whole patches, so what a side keeps of a patch may round up to one more.
    rows, columns = max(1, found.height // patch), max(1, found.width // patch)
    assert (rows - 1) * (columns - 1) <= 900
    unit = patch * merge
    assert found.num_tokens == math.ceil(found.width / unit) * math.ceil(found.height / unit)


@given(st.integers(200, 3000), st.integers(200, 3000))
def test_shape_is_kept_within_a_pixel(width: int, height: int) -> None:
    config = replace(K3, max_patches=100)
    found = plan(width, height, config)
    exact = Fraction(height * found.width, width)
    # The scale is one number for both sides; each side then loses less than a pixel.
    slack = max(Fraction(height, width), Fraction(1)) + 1
    assert abs(exact - found.height) <= slack
