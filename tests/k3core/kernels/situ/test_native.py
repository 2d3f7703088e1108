"""The gated activation against float64, near zero and far into saturation."""

import pytest
import torch

from k3core.kernels.cpu_native import native_library
from k3core.kernels.interface import Activation
from k3core.kernels.situ import reference
from k3core.kernels.situ.native import NativeActivation

KINDS = [Activation(4.0, 25.0), Activation(4.0, None), Activation(None, None)]


@pytest.fixture(scope="module")
def activate() -> NativeActivation:
    return NativeActivation(native_library())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 8, 13, 100])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 30.0])
def test_it_meets_float64(
    activate: NativeActivation, kind: Activation, width: int, scale: float
) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(11, 2 * width + 5, generator=generator)[:, 3:-2] * scale
    truth = reference.activate(x.double(), kind)
    relative = (activate.run(x, kind) - truth).abs() / truth.abs().clamp_min(1e-30)
    assert relative.max() <= 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_extremes_saturate_and_a_nan_stays(activate: NativeActivation, kind: Activation) -> None:
    x = torch.tensor([[-1e30, -100.0, 1e3, float("nan"), 1.0, 1.0, 1.0, 1.0]])
    out = activate.run(x, kind)
    assert out[0, :2].abs().max() < 1e-30
    assert out[0, 2].isfinite()
    assert out[0, 3].isnan()


def test_bfloat16_is_computed_in_float32(activate: NativeActivation) -> None:
    x = torch.randn(7, 3, 26, generator=torch.Generator().manual_seed(0)).bfloat16()
    kind = KINDS[0]
    assert torch.equal(activate.run(x, kind), activate.run(x.float(), kind).bfloat16())


@pytest.mark.parametrize("kind", [*KINDS, Activation(100.0, 100.0), Activation(1e3, 1e4)])
def test_large_inputs_give_what_they_give_in_float64(
    activate: NativeActivation, kind: Activation
) -> None:
    """A closed gate times something large is nothing, and only a large result is large."""
    gates = torch.tensor([-1e30, -1e20, -1e4, -40.0, -1.0, 1.0, 15.0, 60.0, 1e4, 1e20])
    ups = torch.tensor([-1e37, -1e20, -1e4, -1.0, 1.0, 1e4, 1e17])
    x = torch.cartesian_prod(gates, ups).T.reshape(1, -1)
    truth = reference.activate(x.double(), kind)
    assert torch.allclose(activate.run(x, kind), truth.float(), rtol=2e-6, atol=1e-30)
