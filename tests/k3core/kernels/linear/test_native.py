"""Matrix products: exact sums for odd sizes and types, and rows that ignore their batch.

Each with weights as they are stored and with weights prepared, which are kept in panels.
"""

import gc
from collections.abc import Callable

import pytest
import torch

from k3core.kernels.cpu_native import native_library
from k3core.kernels.linear.native import PANEL, NativeLinear, in_panels

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
    (4, 64, 130),
    (6, 200, 16),
    (149, 300, 257),
]


Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(params=["stored", "prepared"])
def multiply(request: pytest.FixtureRequest) -> Multiply:
    linear = NativeLinear(native_library())

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if request.param == "prepared":
            linear.prepare(weight)
        return linear.run(x, weight)

    return run


def _draw(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), SIZES)
def test_products_meet_float64(
    multiply: Multiply, num_rows: int, num_inputs: int, num_outputs: int
) -> None:
    x, weight = _draw(num_rows, num_inputs), _draw(num_outputs, num_inputs, seed=1)
    truth = x.double() @ weight.double().T
    assert (multiply(x, weight) - truth).abs().max() <= 1e-6 * truth.abs().max().clamp_min(1)


@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), SIZES)
def test_bfloat16_is_summed_in_float32_and_rounded_once(
    multiply: Multiply, num_rows: int, num_inputs: int, num_outputs: int
) -> None:
    x = _draw(num_rows, num_inputs).bfloat16()
    weight = _draw(num_outputs, num_inputs, seed=1).bfloat16()
    out = multiply(x, weight)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, multiply(x.float(), weight.float()).bfloat16())


def test_strides_and_leading_axes_are_followed(multiply: Multiply) -> None:
    wide, table = _draw(2, 3, 50), _draw(20, 40, seed=1)
    x, weight = wide[..., 3:23], table[:, 10:30]
    truth = x.double() @ weight.double().T
    out = multiply(x, weight)
    assert out.shape == (2, 3, 20)
    assert (out - truth).abs().max() <= 1e-5


@pytest.mark.parametrize("num_inputs", [40, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_among_others(
    multiply: Multiply, dtype: torch.dtype, num_inputs: int
) -> None:
    x, weight = _draw(160, num_inputs).to(dtype), _draw(170, num_inputs, seed=1).to(dtype)
    together = multiply(x, weight)
    for first, count in ((0, 1), (7, 2), (1, 3), (9, 4), (12, 5), (20, 6), (20, 11), (40, 115)):
        rows = slice(first, first + count)
        assert torch.equal(multiply(x[rows], weight), together[rows]), count


def test_no_rows_give_no_rows(multiply: Multiply) -> None:
    assert multiply(_draw(0, 8), _draw(5, 8)).shape == (0, 5)


def test_a_row_without_elements_sums_to_nothing(multiply: Multiply) -> None:
    assert torch.equal(multiply(_draw(7, 0), _draw(18, 0)), torch.zeros(7, 18))


def test_panels_hold_each_weight_once_and_zeros_behind() -> None:
    weight = _draw(PANEL + 3, 5)
    panels = in_panels(weight)
    assert panels.shape == (2, 5, PANEL)
    rows = panels.transpose(1, 2).flatten(0, 1)
    assert torch.equal(rows[: PANEL + 3], weight)
    assert not rows[PANEL + 3 :].any()


def test_panels_go_with_their_weight_and_a_weight_prepared_again_is_read_again() -> None:
    linear = NativeLinear(native_library())
    x, weight = _draw(2, 8), _draw(5, 8)
    linear.prepare(weight)
    weight *= 2
    linear.prepare(weight)
    assert torch.allclose(linear.run(x, weight), x @ weight.T, atol=1e-6)
    assert linear.num_prepared == 1
    del weight
    gc.collect()
    assert linear.num_prepared == 0


def test_a_weight_that_cannot_be_multiplied_is_left_to_say_so() -> None:
    linear = NativeLinear(native_library())
    weight = _draw(5, 8).double()
    linear.prepare(weight)
    with pytest.raises(TypeError, match="float64"):
        linear.run(_draw(2, 8), weight)


@pytest.mark.parametrize(("before", "after"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_weight_given_other_memory_is_no_longer_the_prepared_one(before: str, after: str) -> None:
    linear = NativeLinear(native_library())
    x, weight = _draw(7, 24), _draw(40, 24, seed=1).to(getattr(torch, before))
    linear.prepare(weight)
    # What `Module.to` does with parameters: the tensor stays, its elements lie elsewhere.
    weight.data = _draw(40, 24, seed=2).to(getattr(torch, after))
    truth = x.double() @ weight.double().T
    assert (linear.run(x, weight) - truth).abs().max() <= 1e-5
