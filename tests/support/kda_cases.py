"""Cases of KDA that every form of it is tested on: odd shapes, spiky gates, strided views."""

import torch

from k3core.kernels.interface import KdaInputs, KdaPlan, KdaStates, KdaWeights

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


def make_case(
    num_tokens: int,
    shape: tuple[int, int, int, int],
    bound: float | None,
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[KdaInputs, KdaWeights, KdaStates]:
    """Inputs, weights and filled pages, drawn from the seed."""
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


def make_plan(
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


def copy_states(states: KdaStates, dtype: torch.dtype | None = None) -> KdaStates:
    """A copy as slices of wider pages, so that page strides are not what shapes suggest."""
    recurrent = states.recurrent.to(dtype or states.recurrent.dtype)
    conv = states.conv.to(dtype or states.conv.dtype)
    return KdaStates(
        torch.stack((recurrent, torch.zeros_like(recurrent)), dim=1)[:, 0],
        torch.stack((conv, torch.zeros_like(conv)), dim=1)[:, 0],
    )


def rows_of(inputs: KdaInputs, rows: slice) -> KdaInputs:
    return KdaInputs(inputs.qkv[rows], inputs.gate[rows], inputs.beta[rows])


def to_double(inputs: KdaInputs, weights: KdaWeights) -> tuple[KdaInputs, KdaWeights]:
    return (
        KdaInputs(inputs.qkv.double(), inputs.gate.double(), inputs.beta.double()),
        KdaWeights(
            weights.conv.double(),
            weights.a_log.double(),
            weights.dt_bias.double(),
            weights.lower_bound,
        ),
    )


def assert_close(actual: torch.Tensor, truth: torch.Tensor, relative: float = 3e-6) -> None:
    """Against the largest value: rounding is relative to the sums, not to what cancels."""
    scale = truth.abs().max().clamp_min(1e-6)
    assert (actual.double() - truth.double()).abs().max() <= relative * scale
