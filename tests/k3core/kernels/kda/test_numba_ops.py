"""The numba recurrence against a float64 loop over tokens, and its exports."""

import pytest
import torch
from support.kda_cases import (
    BOUNDS,
    SHAPES,
    assert_close,
    copy_states,
    make_case,
    make_plan,
    rows_of,
    to_double,
)

from k3core.kernels.kda import reference
from k3core.kernels.kda.numba_ops import NumbaKda

# Compiling inside the first call takes some seconds.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def kda() -> NumbaKda:
    return NumbaKda(2)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_of_any_length_meet_the_float64_loop(
    kda: NumbaKda, shape: tuple[int, int, int, int], bound: float | None
) -> None:
    inputs, weights, states = make_case(60, shape, bound, seed=1)
    plan = make_plan(
        [1, 2, 17, 40],
        [3, 7, 5, 1],
        [True, False, True, False],
        exports=((2, 1, 10), (2, 16, 11), (1, 2, 12), (3, 2, 13), (3, 17, 14), (3, 40, 15)),
    )
    truth_states, actual_states = copy_states(states, torch.float64), copy_states(states)
    truth = reference.prefill(*to_double(inputs, weights), plan, truth_states)
    actual = kda.run(inputs, weights, plan, actual_states)
    assert_close(actual, truth)
    assert_close(actual_states.recurrent, truth_states.recurrent)
    assert torch.equal(actual_states.conv.double(), truth_states.conv)


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_decode_step_meets_the_float64_loop(kda: NumbaKda, bound: float | None) -> None:
    inputs, weights, states = make_case(13, SHAPES[2], bound, seed=2)
    plan = make_plan([1] * 13, list(range(20, 7, -1)), [i % 4 != 0 for i in range(13)])
    truth_states, actual_states = copy_states(states, torch.float64), copy_states(states)
    truth = reference.decode(*to_double(inputs, weights), plan, truth_states)
    actual = kda.run(inputs, weights, plan, actual_states)
    assert_close(actual, truth)
    assert_close(actual_states.recurrent, truth_states.recurrent)
    assert torch.equal(actual_states.conv.double(), truth_states.conv)


def test_a_row_differs_from_itself_in_a_batch_by_rounding_only(kda: NumbaKda) -> None:
    lengths = [1, 30, 1, 2, 16]
    inputs, weights, states = make_case(50, SHAPES[0], -5.0, seed=6)
    together = copy_states(states)
    plan = make_plan(lengths, [0, 2, 4, 6, 8], [True] * 5)
    expected = kda.run(inputs, weights, plan, together)
    for i in range(5):
        alone = copy_states(states)
        rows = slice(plan.starts[i], plan.starts[i + 1])
        single = make_plan([lengths[i]], [2 * i], [True])
        out = kda.run(rows_of(inputs, rows), weights, single, alone)
        assert_close(out, expected[rows].double(), 1e-6)
        assert_close(alone.recurrent[2 * i], together.recurrent[2 * i].double(), 1e-6)
