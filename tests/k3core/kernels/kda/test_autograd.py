"""Gradients of the compiled recurrence against torch's own through a float64 loop."""

import pytest
import torch

from k3core.kernels.cpu_native import native_library
from k3core.kernels.interface import KdaInputs, KdaWeights
from k3core.kernels.kda import reference
from k3core.kernels.kda.autograd import NativeKdaDense
from k3core.kernels.training import training_kernels

# (B, T, H, K, V): one token, just under, at and over a kept state, widths that are no vectors.
SIZES = [
    (1, 1, 1, 8, 8),
    (2, 31, 3, 16, 16),
    (1, 32, 2, 5, 7),
    (2, 70, 2, 12, 20),
    (1, 97, 1, 32, 8),
]
BOUNDS = [-5.0, None, -20.0]


@pytest.fixture(scope="module")
def dense() -> NativeKdaDense:
    return NativeKdaDense(native_library())


def _leaves(size: tuple[int, int, int, int, int], seed: int) -> list[torch.Tensor]:
    """qkv, gate, beta, conv, a_log, dt_bias in float64, all wanting gradients."""
    num_sequences, num_tokens, num_heads, key_dim, value_dim = size
    channels = num_heads * (2 * key_dim + value_dim)
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (num_sequences, num_tokens, channels),
        (num_sequences, num_tokens, num_heads, key_dim),
        (num_sequences, num_tokens, num_heads),
        (channels, 4),
        (num_heads,),
        (num_heads, key_dim),
    ]
    drawn = [torch.randn(*shape, generator=generator).float().double() for shape in shapes]
    return [x.requires_grad_() for x in drawn]


def _run(run: object, leaves: list[torch.Tensor], bound: float | None) -> torch.Tensor:
    qkv, gate, beta, *small = leaves
    assert callable(run)
    out = run(KdaInputs(qkv, gate, beta), KdaWeights(*small, bound))
    assert isinstance(out, torch.Tensor)
    return out


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("size", SIZES)
def test_outputs_and_gradients_meet_the_float64_loop(
    dense: NativeKdaDense, size: tuple[int, int, int, int, int], bound: float | None
) -> None:
    wide = _leaves(size, seed=1)
    narrow = [x.detach().float().requires_grad_() for x in wide]
    truth = _run(reference.dense, wide, bound)
    out = _run(dense.run, narrow, bound)
    assert (out - truth).abs().max() <= 3e-6 * truth.abs().max()
    pull = torch.randn(truth.shape, generator=torch.Generator().manual_seed(2))
    truth.backward(pull.double())
    out.backward(pull)
    for ours, theirs in zip(narrow, wide, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        gap = (ours.grad - theirs.grad).abs().max()
        assert gap <= 2e-5 * theirs.grad.abs().max().clamp_min(1e-3)


def test_a_gradient_through_a_view_of_the_output_arrives(dense: NativeKdaDense) -> None:
    """The gradient of o comes expanded, not dense, where o is summed."""
    wide = _leaves(SIZES[1], seed=3)
    narrow = [x.detach().float().requires_grad_() for x in wide]
    _run(reference.dense, wide, -5.0).sum().backward()
    _run(dense.run, narrow, -5.0).sum().backward()
    assert narrow[0].grad is not None
    assert wide[0].grad is not None
    gap = (narrow[0].grad - wide[0].grad).abs().max()
    assert gap <= 2e-5 * wide[0].grad.abs().max()


def test_sequences_of_a_batch_do_not_touch(dense: NativeKdaDense) -> None:
    leaves = [x.detach().float() for x in _leaves(SIZES[1], seed=4)]
    together = _run(dense.run, leaves, -5.0)
    alone = _run(dense.run, [leaves[0][1:], leaves[1][1:], leaves[2][1:], *leaves[3:]], -5.0)
    assert (together[1:] - alone).abs().max() <= 1e-6


def test_training_kernels_train_through_it() -> None:
    leaves = [x.detach().float().requires_grad_() for x in _leaves(SIZES[1], seed=6)]
    kernels = training_kernels()
    assert kernels.name == "cpu-train"
    _run(kernels.kda_dense, leaves, -5.0).square().sum().backward()
    assert all(leaf.grad is not None and leaf.grad.abs().max() > 0 for leaf in leaves)


def test_float64_is_refused_rather_than_narrowed(dense: NativeKdaDense) -> None:
    with pytest.raises(TypeError, match="float64"):
        _run(dense.run, _leaves(SIZES[0], seed=5), -5.0)
