"""MXFP4 blocks: every code, every scale that occurs, and the nearest code on the way back."""

import pytest
import torch

from k3core.kernels.mxfp4.reference import E2M1_MAGNITUDES, dequantise, quantise

GROUP = 4


def decode_by_hand(byte: int, scale: int) -> tuple[float, float]:
    """Both elements of a byte, the earlier one first."""

    def element(code: int) -> float:
        sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        value = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        return (-value if sign else value) * 2.0 ** (scale - 127)

    return element(byte & 15), element(byte >> 4)


@pytest.mark.parametrize("scale", [1, 60, 127, 128, 200, 250])
def test_every_byte_decodes_by_the_standard(scale: int) -> None:
    packed = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    scales = torch.full((16, 32 // GROUP), scale, dtype=torch.uint8)
    found = dequantise(packed, scales, GROUP, torch.float32).flatten().tolist()
    wanted = [value for byte in range(256) for value in decode_by_hand(byte, scale)]
    assert found == wanted


def test_each_group_has_its_own_scale() -> None:
    packed = torch.full((1, 4), 0x22, dtype=torch.uint8)
    scales = torch.tensor([[127, 129]], dtype=torch.uint8)
    found = dequantise(packed, scales, GROUP, torch.float32)
    assert found.tolist() == [[1.0] * 4 + [4.0] * 4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_bfloat16_holds_every_value_exactly(dtype: torch.dtype) -> None:
    packed = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    scales = torch.full((16, 8), 130, dtype=torch.uint8)
    exact = dequantise(packed, scales, GROUP, torch.float32)
    assert torch.equal(dequantise(packed, scales, GROUP, dtype).float(), exact)


def test_packing_takes_the_nearest_code_and_keeps_what_is_exact() -> None:
    weight = torch.randn(6, 5, 64, generator=torch.Generator().manual_seed(0)) * 3
    packed, scale = quantise(weight, 32)
    restored = dequantise(packed, scale, 32, torch.float32)
    step = torch.exp2(scale.float() - 127).repeat_interleave(32, -1)
    grid = torch.tensor(E2M1_MAGNITUDES)
    grid = torch.cat((-grid.flip(0), grid))
    nearest = ((weight / step).unsqueeze(-1) - grid).abs().amin(-1)
    assert torch.allclose((restored - weight).abs() / step, nearest, atol=1e-5)
    again = quantise(restored, 32)
    assert torch.equal(dequantise(*again, 32, torch.float32), restored)


def test_a_block_of_zeros_stays_zeros() -> None:
    packed, scale = quantise(torch.zeros(2, 32), 32)
    assert not dequantise(packed, scale, 32, torch.float32).any()
