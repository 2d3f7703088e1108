"""MXFP4 blocks in plain torch: packing and unpacking.

A byte holds two elements, the earlier one in the low nibble; an element is E2M1 (bit 3 the
sign); `group` consecutive elements share one E8M0 scale 2 ** (byte - 127).

Source: OCP Microscaling Formats v1.0; K3 architecture sheet, section 3.3.
"""

import torch

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E8M0_BIAS = 127
# Exponent of the largest E2M1 magnitude, 6 = 1.5 * 2 ** 2.
E2M1_MAX_EXPONENT = 2


def dequantise(
    packed: torch.Tensor, scale: torch.Tensor, group: int, dtype: torch.dtype
) -> torch.Tensor:
    """Unpack uint8 [..., I / 2] with scales uint8 [..., I / group] to [..., I].

    Exact in float32 and, but for scales below 2 ** -124, in bfloat16.
    """
    magnitudes = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float32, device=packed.device)
    values = torch.cat((magnitudes, -magnitudes))
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    elements = values[codes.long()].unflatten(-1, (-1, group))
    exponents = scale.to(torch.int32) - E8M0_BIAS
    return torch.ldexp(elements, exponents.unsqueeze(-1)).flatten(-2).to(dtype)


def quantise(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack [..., I] to (uint8 [..., I / 2], scale uint8 [..., I / group]).

    The scale is the power of two that brings the block's largest element into E2M1's top
    binade, as the OCP standard proposes; elements round to the nearest magnitude, the
    lower one at a tie, and saturate at 6.
    """
    blocks = weight.float().unflatten(-1, (-1, group))
    largest = blocks.abs().amax(-1)
    exponent = torch.frexp(largest).exponent - 1 - E2M1_MAX_EXPONENT
    exponent = torch.where(largest > 0, exponent, -E8M0_BIAS).clamp(-E8M0_BIAS, E8M0_BIAS)
    scaled = torch.ldexp(blocks, -exponent.unsqueeze(-1))
    magnitudes = torch.tensor(E2M1_MAGNITUDES, device=weight.device)
    borders = (magnitudes[1:] + magnitudes[:-1]) / 2
    codes = torch.bucketize(scaled.abs(), borders) + 8 * (scaled < 0)
    pairs = codes.flatten(-2).unflatten(-1, (-1, 2)).to(torch.uint8)
    return pairs[..., 0] | (pairs[..., 1] << 4), (exponent + E8M0_BIAS).to(torch.uint8)
