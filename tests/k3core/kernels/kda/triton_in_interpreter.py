"""Checks the Triton kernels in Triton's interpreter; run by test_triton_ops in a process.

The interpreter must be chosen before the kernels are imported and cannot be left again, hence
a process of its own. Not collected by itself.
"""

import sys

import torch
from support.kda_cases import assert_close, copy_states, make_case, make_plan, to_double

from k3core.kernels.kda import reference
from k3core.kernels.kda.triton_ops import TritonKda


def check_prefill(shape: tuple[int, int, int, int], bound: float | None) -> None:
    """Chunks of several lengths with exports, some inside the first window."""
    inputs, weights, states = make_case(23, shape, bound, seed=1)
    plan = make_plan(
        [1, 2, 7, 13],
        [3, 7, 5, 1],
        [True, False, True, False],
        exports=((3, 9, 14), (3, 13, 15), (2, 1, 10), (2, 7, 11), (1, 2, 12), (3, 2, 13)),
    )
    truth_states, actual_states = copy_states(states, torch.float64), copy_states(states)
    truth = reference.prefill(*to_double(inputs, weights), plan, truth_states)
    actual = TritonKda().run(inputs, weights, plan, actual_states)
    assert_close(actual, truth)
    assert_close(actual_states.recurrent, truth_states.recurrent)
    assert torch.equal(actual_states.conv.double(), truth_states.conv)


def check_decode(shape: tuple[int, int, int, int], bound: float | None) -> None:
    """Single tokens of several sequences."""
    inputs, weights, states = make_case(4, shape, bound, seed=2)
    plan = make_plan([1] * 4, [20, 3, 5, 7], [True, False, True, True])
    truth_states, actual_states = copy_states(states, torch.float64), copy_states(states)
    truth = reference.decode(*to_double(inputs, weights), plan, truth_states)
    actual = TritonKda().run(inputs, weights, plan, actual_states)
    assert_close(actual, truth)
    assert_close(actual_states.recurrent, truth_states.recurrent)
    assert torch.equal(actual_states.conv.double(), truth_states.conv)


def main() -> int:
    """Run every check; an assertion ends the process with its traceback."""
    for shape, bound in (
        ((2, 12, 20, 4), None),
        ((1, 32, 8, 3), -20.0),
        ((1, 64, 96, 2), -5.0),
    ):
        check_prefill(shape, bound)
        check_decode(shape, bound)
    return 0


if __name__ == "__main__":
    sys.exit(main())
