"""Matrix products: exact sums for odd sizes and types, and rows that ignore their batch."""

import pytest
import torch

from k3core.kernels.cpu_native import native_library
from k3core.kernels.linear.native import NativeLinear

# (M, I, O): single rows, sums shorter than a vector, tails in every direction, many blocks.
SIZES = [
    (1, 64, 64),
    (1, 7, 5),
    (2, 100, 33),
    (3, 8, 1),
    (5, 513, 37),
    (200, 96, 70),
    (31, 1, 9),
    (150, 1100, 19),
]


@pytest.fixture(scope="module")
def linear() -> NativeLinear:
    return NativeLinear(native_library())


def _draw(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), SIZES)
def test_products_meet_float64(
    linear: NativeLinear, num_rows: int, num_inputs: int, num_outputs: int
) -> None:
    x, weight = _draw(num_rows, num_inputs), _draw(num_outputs, num_inputs, seed=1)
    truth = x.double() @ weight.double().T
    assert (linear.run(x, weight) - truth).abs().max() <= 1e-6 * truth.abs().max().clamp_min(1)


@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), SIZES)
def test_bfloat16_is_summed_in_float32_and_rounded_once(
    linear: NativeLinear, num_rows: int, num_inputs: int, num_outputs: int
) -> None:
    x = _draw(num_rows, num_inputs).bfloat16()
    weight = _draw(num_outputs, num_inputs, seed=1).bfloat16()
    out = linear.run(x, weight)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, linear.run(x.float(), weight.float()).bfloat16())


def test_strides_and_leading_axes_are_followed(linear: NativeLinear) -> None:
    wide, table = _draw(2, 3, 50), _draw(20, 40, seed=1)
    x, weight = wide[..., 3:23], table[:, 10:30]
    truth = x.double() @ weight.double().T
    out = linear.run(x, weight)
    assert out.shape == (2, 3, 20)
    assert (out - truth).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_among_others(
    linear: NativeLinear, dtype: torch.dtype
) -> None:
    x, weight = _draw(160, 1100).to(dtype), _draw(43, 1100, seed=1).to(dtype)
    together = linear.run(x, weight)
    for rows in (slice(0, 1), slice(7, 9), slice(1, 4), slice(40, 155)):
        assert torch.equal(linear.run(x[rows], weight), together[rows])


def test_no_rows_give_no_rows(linear: NativeLinear) -> None:
    assert linear.run(_draw(0, 8), _draw(5, 8)).shape == (0, 5)
