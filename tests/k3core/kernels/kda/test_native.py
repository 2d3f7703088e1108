"""The compiled KDA against a float64 loop over tokens, and its promises of equal bits."""

import itertools

import pytest
import torch

from k3core.kernels.cpu_native import native_library
from k3core.kernels.interface import KdaInputs, KdaPlan, KdaStates, KdaWeights
from k3core.kernels.kda import reference
from k3core.kernels.kda.native import NativeKda

# (H, K, V, W): K != V, nothing a multiple of a vector, one head, wide heads, other taps.
SHAPES = [
    (3, 16, 16, 4),
    (1, 64, 64, 4),
    (5, 12, 20, 4),
    (2, 32, 8, 3),
    (3, 128, 128, 2),
    (2, 7, 5, 4),
]
# Bounds of the gate: K3's, Kimi-Linear's unbounded one, and one that wipes the state.
BOUNDS = [-5.0, None, -20.0]
NUM_PAGES = 24


@pytest.fixture(scope="module")
def kda() -> NativeKda:
    return NativeKda(native_library())


def _case(
    num_tokens: int,
    shape: tuple[int, int, int, int],
    bound: float | None,
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[KdaInputs, KdaWeights, KdaStates]:
    num_heads, key_dim, value_dim, num_taps = shape
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    channels = num_heads * (2 * key_dim + value_dim)
    # Rows are slices of a wider projection, as the model hands them over.
    wide = draw(num_tokens, channels + 9).to(dtype)
    gates = draw(num_tokens, num_heads, key_dim) * 3
    # Spikes: a channel that forgets all beside channels that forget nothing.
    gates[::5, :, ::3], gates[1::5, :, ::3] = 40.0, -40.0
    inputs = KdaInputs(
        wide[:, 4 : 4 + channels], gates.to(dtype), draw(num_tokens, num_heads).to(dtype)
    )
    weights = KdaWeights(
        draw(channels, num_taps) * 0.5,
        draw(num_heads) * 0.5,
        draw(num_heads, key_dim),
        bound,
    )
    states = KdaStates(
        draw(NUM_PAGES, num_heads, value_dim, key_dim),
        draw(NUM_PAGES, num_taps - 1, channels).to(dtype),
    )
    return inputs, weights, states


def _plan(
    lengths: list[int],
    pages: list[int],
    has_state: list[bool],
    exports: tuple[tuple[int, int, int], ...] = (),
) -> KdaPlan:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return KdaPlan(
        starts=tuple(starts),
        has_state=tuple(has_state),
        pages=tuple(pages),
        page_ids=torch.tensor(pages),
        state_mask=torch.tensor(has_state),
        exports=exports,
    )


def _copy(states: KdaStates, dtype: torch.dtype | None = None) -> KdaStates:
    """A copy as slices of wider pages, so that page strides are not what shapes suggest."""
    recurrent = states.recurrent.to(dtype or states.recurrent.dtype)
    conv = states.conv.to(dtype or states.conv.dtype)
    return KdaStates(
        torch.stack((recurrent, torch.zeros_like(recurrent)), dim=1)[:, 0],
        torch.stack((conv, torch.zeros_like(conv)), dim=1)[:, 0],
    )


def _rows(inputs: KdaInputs, rows: slice) -> KdaInputs:
    return KdaInputs(inputs.qkv[rows], inputs.gate[rows], inputs.beta[rows])


def _double(inputs: KdaInputs, weights: KdaWeights) -> tuple[KdaInputs, KdaWeights]:
    return (
        KdaInputs(inputs.qkv.double(), inputs.gate.double(), inputs.beta.double()),
        KdaWeights(
            weights.conv.double(),
            weights.a_log.double(),
            weights.dt_bias.double(),
            weights.lower_bound,
        ),
    )


def _assert_close(actual: torch.Tensor, truth: torch.Tensor, relative: float = 3e-6) -> None:
    """Against the largest value: rounding is relative to the sums, not to what cancels."""
    scale = truth.abs().max().clamp_min(1e-6)
    assert (actual.double() - truth.double()).abs().max() <= relative * scale


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_of_any_length_meet_the_float64_loop(
    kda: NativeKda, shape: tuple[int, int, int, int], bound: float | None
) -> None:
    inputs, weights, states = _case(60, shape, bound, seed=1)
    plan = _plan(
        [1, 2, 17, 40],
        [3, 7, 5, 1],
        [True, False, True, False],
        exports=((2, 1, 10), (2, 16, 11), (1, 2, 12), (3, 2, 13), (3, 17, 14), (3, 40, 15)),
    )
    truth_states, actual_states = _copy(states, torch.float64), _copy(states)
    truth = reference.prefill(*_double(inputs, weights), plan, truth_states)
    actual = kda.run(inputs, weights, plan, actual_states)
    _assert_close(actual, truth)
    _assert_close(actual_states.recurrent, truth_states.recurrent)
    assert torch.equal(actual_states.conv.double(), truth_states.conv)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_decode_step_meets_the_float64_loop(
    kda: NativeKda, shape: tuple[int, int, int, int], bound: float | None
) -> None:
    inputs, weights, states = _case(13, shape, bound, seed=2)
    plan = _plan([1] * 13, list(range(20, 7, -1)), [i % 4 != 0 for i in range(13)])
    truth_states, actual_states = _copy(states, torch.float64), _copy(states)
    truth = reference.decode(*_double(inputs, weights), plan, truth_states)
    actual = kda.run(inputs, weights, plan, actual_states)
    _assert_close(actual, truth)
    _assert_close(actual_states.recurrent, truth_states.recurrent)
    assert torch.equal(actual_states.conv.double(), truth_states.conv)


def test_bfloat16_inputs_are_widened_and_windows_keep_their_bits(kda: NativeKda) -> None:
    inputs, weights, states = _case(30, (3, 16, 24, 4), -5.0, 3, torch.bfloat16)
    plan = _plan([2, 28], [3, 4], [True, True], exports=((1, 1, 9),))
    truth_states, actual_states = _copy(states), _copy(states)
    truth_states = KdaStates(truth_states.recurrent.double(), truth_states.conv.double())
    truth = reference.prefill(*_double(inputs, weights), plan, truth_states)
    actual = kda.run(inputs, weights, plan, actual_states)
    assert actual.dtype == torch.float32
    _assert_close(actual, truth)
    assert torch.equal(actual_states.conv.double(), truth_states.conv)


@pytest.mark.parametrize("shape", SHAPES)
def test_cutting_a_sequence_anywhere_changes_no_bit(
    kda: NativeKda, shape: tuple[int, int, int, int]
) -> None:
    inputs, weights, states = _case(50, shape, -5.0, seed=4)
    whole, cut = _copy(states), _copy(states)
    expected = kda.run(inputs, weights, _plan([50], [3], [True]), whole)
    cuts = [0, 1, 2, 5, 20, 21, 22, 38, 49, 50]
    parts = [
        kda.run(_rows(inputs, slice(a, b)), weights, _plan([b - a], [3], [True]), cut)
        for a, b in itertools.pairwise(cuts)
    ]
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(cut.recurrent, whole.recurrent)
    assert torch.equal(cut.conv, whole.conv)


def test_an_export_has_the_bits_of_a_run_that_stops_there(kda: NativeKda) -> None:
    inputs, weights, states = _case(40, (2, 16, 16, 4), -5.0, seed=5)
    exported, stopped, plain = _copy(states), _copy(states), _copy(states)
    offsets = [1, 2, 3, 16, 31, 32, 40]
    exports = tuple((0, offset, 10 + i) for i, offset in enumerate(offsets))
    with_exports = kda.run(inputs, weights, _plan([40], [3], [True], exports), exported)
    without = kda.run(inputs, weights, _plan([40], [3], [True]), plain)
    assert torch.equal(with_exports, without)
    assert torch.equal(exported.recurrent[3], plain.recurrent[3])
    for i, offset in enumerate(offsets):
        stopped = _copy(states)
        part = _rows(inputs, slice(0, offset))
        kda.run(part, weights, _plan([offset], [3], [True]), stopped)
        assert torch.equal(exported.recurrent[10 + i], stopped.recurrent[3])
        assert torch.equal(exported.conv[10 + i], stopped.conv[3])


@pytest.mark.parametrize("lengths", [[1] * 9, [1, 30, 1, 2, 16]])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(kda: NativeKda, lengths: list[int]) -> None:
    inputs, weights, states = _case(sum(lengths), (3, 16, 16, 4), -5.0, seed=6)
    pages = [2 * i for i in range(len(lengths))]
    together = _copy(states)
    plan = _plan(lengths, pages, [True] * len(lengths))
    expected = kda.run(inputs, weights, plan, together)
    for i, page in enumerate(pages):
        alone = _copy(states)
        rows = slice(plan.starts[i], plan.starts[i + 1])
        out = kda.run(_rows(inputs, rows), weights, _plan([lengths[i]], [page], [True]), alone)
        assert torch.equal(out, expected[rows])
        assert torch.equal(alone.recurrent[page], together.recurrent[page])


def test_the_number_of_threads_changes_no_bit(kda: NativeKda) -> None:
    library = native_library()
    inputs, weights, states = _case(64, (5, 16, 16, 4), -5.0, seed=7)
    plan = _plan([1, 33, 30], [1, 2, 3], [True] * 3)
    before = library.get_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            library.set_threads(threads)
            mine = _copy(states)
            results.append((kda.run(inputs, weights, plan, mine), mine.recurrent))
    finally:
        library.set_threads(before)
    for out, recurrent in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(recurrent, results[0][1])


def test_other_pages_are_left_alone(kda: NativeKda) -> None:
    inputs, weights, states = _case(20, (2, 16, 16, 4), -5.0, seed=8)
    mine = _copy(states)
    kda.run(inputs, weights, _plan([20], [3], [False], ((0, 7, 5),)), mine)
    others = [p for p in range(NUM_PAGES) if p not in (3, 5)]
    assert torch.equal(mine.recurrent[others], states.recurrent[others])
    assert torch.equal(mine.conv[others], states.conv[others])


def test_a_dtype_it_cannot_compute_in_is_refused(kda: NativeKda) -> None:
    inputs, weights, states = _case(3, (2, 16, 16, 4), -5.0, 9, torch.float16)
    with pytest.raises(TypeError, match="float16"):
        kda.run(inputs, weights, _plan([3], [1], [True]), states)


def test_a_gradient_is_not_lost_in_silence(kda: NativeKda) -> None:
    inputs, weights, states = _case(3, (2, 16, 16, 4), -5.0, seed=10)
    wanting = KdaInputs(inputs.qkv.requires_grad_(), inputs.gate, inputs.beta)
    with pytest.raises(TypeError, match="gradient"):
        kda.run(wanting, weights, _plan([3], [1], [True]), states)
