"""Rotary positions of drafts, rotated in adjacent pairs, with YaRN where the config has it.

The base model rotates nothing; its drafts do. The shared key part of a row is stored rotated.

Letters: R rotary width.

Source: K3 architecture sheet, section 4.3; YaRN (Peng et al., 2023), section 3.2, with the
logits' correction as DeepSeek-V2 applies it.
"""

import math

import torch

from k3core.drafts.config import DraftAttention, Yarn


def frequencies(attention: DraftAttention) -> torch.Tensor:
    """Angle a position adds to each pair, [R / 2], float64."""
    pairs = torch.arange(0, attention.rope_dim, 2, dtype=torch.float64)
    plain = attention.rope_theta ** (-pairs / attention.rope_dim)
    yarn = attention.yarn
    if yarn is None:
        return plain
    low = math.floor(_pair_of(yarn.beta_fast, attention, yarn))
    high = math.ceil(_pair_of(yarn.beta_slow, attention, yarn))
    low, high = max(low, 0), min(high, attention.rope_dim - 1)
    # A ramp of no width would divide by zero.
    width = max(high - low, 0.001)
    ramp = ((torch.arange(len(plain), dtype=torch.float64) - low) / width).clamp(0, 1)
    return plain * (1 - ramp) + plain / yarn.factor * ramp


def logits_scale(attention: DraftAttention) -> float:
    """What attention logits are multiplied by: (K + R) ** -0.5 and YaRN's correction."""
    scale = attention.query_dim**-0.5
    yarn = attention.yarn
    if yarn is None or yarn.factor <= 1 or not yarn.mscale_all_dim:
        return scale
    return scale * (0.1 * yarn.mscale_all_dim * math.log(yarn.factor) + 1) ** 2


def rotate(x: torch.Tensor, positions: torch.Tensor, per_position: torch.Tensor) -> torch.Tensor:
    """Turn adjacent pairs of the last axis by position, in float32, cast back.

    Args:
        x: [..., R].
        positions: integers that broadcast against x without its last axis.
        per_position: [R / 2], of `frequencies`.
    """
    # float64: at position 10^6 a float32 angle would be off by 0.06.
    angles = positions.unsqueeze(-1).to(torch.float64) * per_position.to(positions.device)
    kind = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angles.cos().to(kind), angles.sin().to(kind)
    even, odd = x.to(kind).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).to(x.dtype)


def _pair_of(turns: float, attention: DraftAttention, yarn: Yarn) -> float:
    """Index of the pair that makes so many turns in the original context."""
    angle = yarn.original_positions / (turns * 2 * math.pi)
    return attention.rope_dim * math.log(angle) / (2 * math.log(attention.rope_theta))
