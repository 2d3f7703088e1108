"""Norms against the reference in float64, and its order of casts in bfloat16."""

import pytest
import torch

from k3core.kernels.cpu_native import native_library
from k3core.kernels.norm import reference
from k3core.kernels.norm.native import NativeNorm


@pytest.fixture(scope="module")
def norm() -> NativeNorm:
    return NativeNorm(native_library())


def _draw(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [1, 7, 16, 100, 513])
def test_rms_norm_meets_float64(norm: NativeNorm, width: int) -> None:
    x, weight = _draw(9, width + 3)[:, 2:-1], _draw(width, seed=1)
    truth = reference.rms_norm(x.double(), weight.double(), 1e-5)
    assert (norm.rms_norm(x, weight, 1e-5) - truth).abs().max() <= 2e-6


def test_rms_norm_rounds_before_the_weight_as_the_reference_does(norm: NativeNorm) -> None:
    x, weight = _draw(40, 64).bfloat16(), _draw(64, seed=1).bfloat16()
    expected = reference.rms_norm(x, weight, 1e-5)
    out = norm.rms_norm(x, weight, 1e-5)
    # A scale that differs in the last bit may turn a tie: a step of bfloat16 at most.
    assert (out.float() - expected.float()).abs().max() <= 2**-7 * expected.abs().max()
    assert (out != expected).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [5, 16, 100])
def test_gated_norm_meets_the_reference(norm: NativeNorm, width: int, dtype: torch.dtype) -> None:
    o, weight = _draw(6, 3, width), _draw(width, seed=1)
    gate = (_draw(6, 3 * width + 8, seed=2) * 4).to(dtype)[:, 4:-4].unflatten(1, (3, width))
    truth = reference.gated_rms_norm(o.double(), weight.double(), gate.double(), 1e-5)
    out = norm.gated_rms_norm(o, weight, gate, 1e-5)
    assert out.dtype == dtype
    tolerance = 2e-6 if dtype == torch.float32 else 2**-8 * truth.abs().max().item()
    assert (out.double() - truth).abs().max() <= tolerance


def test_a_row_of_zeros_stays_zero(norm: NativeNorm) -> None:
    assert torch.equal(norm.rms_norm(torch.zeros(2, 9), torch.ones(9), 1e-5), torch.zeros(2, 9))


def test_rows_ignore_their_batch(norm: NativeNorm) -> None:
    x, weight = _draw(500, 100), _draw(100, seed=1)
    together = norm.rms_norm(x, weight, 1e-5)
    assert torch.equal(norm.rms_norm(x[123:124], weight, 1e-5), together[123:124])
