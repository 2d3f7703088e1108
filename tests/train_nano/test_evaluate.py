"""Intervals of measured accuracies."""

import pytest

from train_nano.evaluate import Result


@pytest.mark.parametrize("num_probes", [1, 6, 12, 30, 100, 200])
def test_an_accuracy_lies_in_its_own_interval(num_probes: int) -> None:
    for num_right in range(num_probes + 1):
        result = Result(num_probes, num_right, None, ())
        low, high = result.interval
        assert 0.0 <= low <= result.accuracy <= high <= 1.0
