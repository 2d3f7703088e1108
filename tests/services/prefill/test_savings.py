import pytest

from k3_prefill.savings import saved_ns
from k3core.engine.costs import StepCosts
from k3wire.messages.media import ImageRef, ImageSlot

COSTS = StepCosts(step_s=1.0, token_s=0.1, pair_s=0.0, chunk_tokens=40)
UNIT = 8


def slot(offset: int, num_tokens: int) -> ImageSlot:
    image = ImageRef(content_key=b"k", media_type="image/png", width=1, height=1, size_bytes=1)
    return ImageSlot(
        image=image, feature_key=b"f", offset=offset, num_tokens=num_tokens, grid_thw=(1, 2, 2)
    )


@pytest.mark.parametrize(
    ("num_cached", "saved_s"),
    # The whole takes three steps, the rest three to one.
    [(0, 0.0), (8, 0.8), (40, 1.0 + 4.0), (80, 2.0 + 8.0), (100, 2.0 + 10.0)],
)
def test_what_is_saved_is_the_whole_less_the_rest(num_cached: int, saved_s: float) -> None:
    assert saved_ns(COSTS, UNIT, 101, (), num_cached) == pytest.approx(saved_s * 1e9)


def test_text_before_a_picture_that_is_needed_is_a_step_of_its_own() -> None:
    slots = (slot(offset=12, num_tokens=6),)
    assert saved_ns(COSTS, UNIT, 30, slots, 24) == pytest.approx((1.0 + 2.4) * 1e9)
    assert saved_ns(COSTS, UNIT, 30, slots, 8) == pytest.approx((1.0 + 0.8) * 1e9)


def test_a_hit_that_adds_a_step_saved_nothing_rather_than_less() -> None:
    slots = (slot(offset=0, num_tokens=8), slot(offset=20, num_tokens=6))
    assert saved_ns(COSTS, UNIT, 30, slots, 8) == 0


def test_nothing_was_saved_before_anything_was_measured() -> None:
    assert saved_ns(StepCosts(), UNIT, 101, (), 80) == 0
