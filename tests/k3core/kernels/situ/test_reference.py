"""The gated activations, value by value."""

import math

import pytest
import torch

from k3core.kernels.interface import Activation
from k3core.kernels.situ.reference import activate


@pytest.mark.parametrize(
    "activation", [Activation(4.0, 25.0), Activation(2.0, None), Activation(None, None)]
)
def test_activation_follows_its_equation(activation: Activation) -> None:
    gates, ups = [-30.0, -1.0, 0.0, 0.5, 7.0, 90.0], [1.0, -400.0, 3.0, 25.0, -7.0, 90.0]
    found = activate(torch.tensor([gates + ups], dtype=torch.float64), activation)[0].tolist()
    for gate, up, value in zip(gates, ups, found, strict=True):
        beta, linear = activation.beta, activation.linear_beta
        front = gate if beta is None else beta * math.tanh(gate / beta)
        back = up if linear is None else linear * math.tanh(up / linear)
        assert value == pytest.approx(front / (1 + math.exp(-gate)) * back, rel=1e-12)


def test_situ_stays_below_its_bounds_in_bfloat16() -> None:
    wide = torch.full((1, 4), 1e4, dtype=torch.bfloat16)
    out = activate(wide, Activation(4.0, 25.0))
    assert out.dtype == torch.bfloat16
    assert (out.float().abs() <= 100).all()
