"""What steps, pictures and tokens cost; `tests/k3core/engine/test_costs.py` has the model's steps."""

import random

import pytest

from k3wire.costs import CostFit


def test_small_pictures_do_not_make_large_ones_dear() -> None:
    fit = CostFit((0.01, 0.0))
    draw = random.Random(3)
    for _ in range(50):
        # A millisecond whatever the size, then 10 ns a pixel: of 400, and of a million now and then.
        for pixels in (400, 400, 400, 1_000_000):
            fit.learn((1, pixels), (1e-3 + 1e-8 * pixels) * draw.uniform(0.9, 1.1))
    assert fit.predict_s((1, 400)) == pytest.approx(1.004e-3, rel=0.1)
    assert fit.predict_s((1, 1_000_000)) == pytest.approx(11e-3, rel=0.1)


def test_nothing_costs_anything_before_it_was_done() -> None:
    fit = CostFit((0.01, 0.0))
    assert fit.predict_s((1, 400)) == 0.0
    fit.learn((1, 400), 2.0)
    assert fit.predict_s((1, 400)) == pytest.approx(2.0)
    assert fit.predict_s((1, 800)) == pytest.approx(4.0)
