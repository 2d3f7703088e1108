"""The compiled KDA against a float64 loop over tokens, and its promises of equal bits."""

import itertools

import pytest
import torch
from support.kda_cases import (
    BOUNDS,
    NUM_PAGES,
    SHAPES,
    assert_close,
    copy_states,
    make_case,
    make_plan,
    rows_of,
    to_double,
)

from k3core.kernels.cpu_native import native_library
from k3core.kernels.interface import KdaInputs, KdaStates
from k3core.kernels.kda import reference
from k3core.kernels.kda.native import NativeKda


@pytest.fixture(scope="module")
def kda() -> NativeKda:
    return NativeKda(native_library())


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_of_any_length_meet_the_float64_loop(
    kda: NativeKda, shape: tuple[int, int, int, int], bound: float | None
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
@pytest.mark.parametrize("shape", SHAPES)
def test_a_decode_step_meets_the_float64_loop(
    kda: NativeKda, shape: tuple[int, int, int, int], bound: float | None
) -> None:
    inputs, weights, states = make_case(13, shape, bound, seed=2)
    plan = make_plan([1] * 13, list(range(20, 7, -1)), [i % 4 != 0 for i in range(13)])
    truth_states, actual_states = copy_states(states, torch.float64), copy_states(states)
    truth = reference.decode(*to_double(inputs, weights), plan, truth_states)
    actual = kda.run(inputs, weights, plan, actual_states)
    assert_close(actual, truth)
    assert_close(actual_states.recurrent, truth_states.recurrent)
    assert torch.equal(actual_states.conv.double(), truth_states.conv)


def test_bfloat16_inputs_are_widened_and_windows_keep_their_bits(kda: NativeKda) -> None:
    inputs, weights, states = make_case(30, (3, 16, 24, 4), -5.0, 3, torch.bfloat16)
    plan = make_plan([2, 28], [3, 4], [True, True], exports=((1, 1, 9),))
    truth_states, actual_states = copy_states(states), copy_states(states)
    truth_states = KdaStates(truth_states.recurrent.double(), truth_states.conv.double())
    truth = reference.prefill(*to_double(inputs, weights), plan, truth_states)
    actual = kda.run(inputs, weights, plan, actual_states)
    assert actual.dtype == torch.float32
    assert_close(actual, truth)
    assert torch.equal(actual_states.conv.double(), truth_states.conv)


@pytest.mark.parametrize("shape", SHAPES)
def test_cutting_a_sequence_anywhere_changes_no_bit(
    kda: NativeKda, shape: tuple[int, int, int, int]
) -> None:
    inputs, weights, states = make_case(50, shape, -5.0, seed=4)
    whole, cut = copy_states(states), copy_states(states)
    expected = kda.run(inputs, weights, make_plan([50], [3], [True]), whole)
    cuts = [0, 1, 2, 5, 20, 21, 22, 38, 49, 50]
    parts = [
        kda.run(rows_of(inputs, slice(a, b)), weights, make_plan([b - a], [3], [True]), cut)
        for a, b in itertools.pairwise(cuts)
    ]
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(cut.recurrent, whole.recurrent)
    assert torch.equal(cut.conv, whole.conv)


def test_an_export_has_the_bits_of_a_run_that_stops_there(kda: NativeKda) -> None:
    inputs, weights, states = make_case(40, (2, 16, 16, 4), -5.0, seed=5)
    exported, stopped, plain = copy_states(states), copy_states(states), copy_states(states)
    offsets = [1, 2, 3, 16, 31, 32, 40]
    exports = tuple((0, offset, 10 + i) for i, offset in enumerate(offsets))
    with_exports = kda.run(inputs, weights, make_plan([40], [3], [True], exports), exported)
    without = kda.run(inputs, weights, make_plan([40], [3], [True]), plain)
    assert torch.equal(with_exports, without)
    assert torch.equal(exported.recurrent[3], plain.recurrent[3])
    for i, offset in enumerate(offsets):
        stopped = copy_states(states)
        part = rows_of(inputs, slice(0, offset))
        kda.run(part, weights, make_plan([offset], [3], [True]), stopped)
        assert torch.equal(exported.recurrent[10 + i], stopped.recurrent[3])
        assert torch.equal(exported.conv[10 + i], stopped.conv[3])


@pytest.mark.parametrize("lengths", [[1] * 9, [1, 30, 1, 2, 16]])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(kda: NativeKda, lengths: list[int]) -> None:
    inputs, weights, states = make_case(sum(lengths), (3, 16, 16, 4), -5.0, seed=6)
    pages = [2 * i for i in range(len(lengths))]
    together = copy_states(states)
    plan = make_plan(lengths, pages, [True] * len(lengths))
    expected = kda.run(inputs, weights, plan, together)
    for i, page in enumerate(pages):
        alone = copy_states(states)
        rows = slice(plan.starts[i], plan.starts[i + 1])
        out = kda.run(
            rows_of(inputs, rows), weights, make_plan([lengths[i]], [page], [True]), alone
        )
        assert torch.equal(out, expected[rows])
        assert torch.equal(alone.recurrent[page], together.recurrent[page])


def test_the_number_of_threads_changes_no_bit(kda: NativeKda) -> None:
    library = native_library()
    inputs, weights, states = make_case(64, (5, 16, 16, 4), -5.0, seed=7)
    plan = make_plan([1, 33, 30], [1, 2, 3], [True] * 3)
    before = library.get_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            library.set_threads(threads)
            mine = copy_states(states)
            results.append((kda.run(inputs, weights, plan, mine), mine.recurrent))
    finally:
        library.set_threads(before)
    for out, recurrent in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(recurrent, results[0][1])


def test_other_pages_are_left_alone(kda: NativeKda) -> None:
    inputs, weights, states = make_case(20, (2, 16, 16, 4), -5.0, seed=8)
    mine = copy_states(states)
    kda.run(inputs, weights, make_plan([20], [3], [False], ((0, 7, 5),)), mine)
    others = [p for p in range(NUM_PAGES) if p not in (3, 5)]
    assert torch.equal(mine.recurrent[others], states.recurrent[others])
    assert torch.equal(mine.conv[others], states.conv[others])


def test_a_dtype_it_cannot_compute_in_is_refused(kda: NativeKda) -> None:
    inputs, weights, states = make_case(3, (2, 16, 16, 4), -5.0, 9, torch.float16)
    with pytest.raises(TypeError, match="float16"):
        kda.run(inputs, weights, make_plan([3], [1], [True]), states)


def test_a_gradient_is_not_lost_in_silence(kda: NativeKda) -> None:
    inputs, weights, states = make_case(3, (2, 16, 16, 4), -5.0, seed=10)
    wanting = KdaInputs(inputs.qkv.requires_grad_(), inputs.gate, inputs.beta)
    with pytest.raises(TypeError, match="gradient"):
        kda.run(wanting, weights, make_plan([3], [1], [True]), states)
