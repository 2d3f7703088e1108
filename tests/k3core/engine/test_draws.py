from hypothesis import given
from hypothesis import strategies as st

from k3core.engine.draws import uniform


@given(seed=st.integers(-(2**63), 2**64), position=st.integers(0, 2**31))
def test_a_draw_is_a_number_below_one_and_a_function_of_seed_and_position(
    seed: int, position: int
) -> None:
    value = uniform(seed, position)
    assert 0.0 <= value < 1.0
    assert value == uniform(seed, position)


def test_draws_fill_the_unit_interval_evenly_along_positions_and_along_seeds() -> None:
    for values in (
        [uniform(7, position) for position in range(20_000)],
        [uniform(seed, 3) for seed in range(20_000)],
    ):
        counts = [0] * 20
        for value in values:
            counts[int(value * 20)] += 1
        # Chi-square with 19 degrees of freedom: 60 is beyond one in a million.
        assert sum((count - 1000) ** 2 / 1000 for count in counts) < 60


def test_neighbouring_positions_and_seeds_are_unrelated() -> None:
    first = [uniform(1, position) for position in range(5000)]
    second = [uniform(1, position + 1) for position in range(5000)]
    third = [uniform(2, position) for position in range(5000)]
    for other in (second, third):
        covariance = sum((a - 0.5) * (b - 0.5) for a, b in zip(first, other, strict=True)) / 5000
        assert abs(covariance * 12) < 0.08
