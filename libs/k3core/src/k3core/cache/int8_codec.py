"""The INT8 form of a recurrent state: symmetric, one scale a head and key channel.

Only checkpoints at rest have it; the state that a request updates never does.
Suffixes: H heads, V value width, K key width.
"""

import torch

_LEVELS = 127.0


def encode(state_HVK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a state.

    Args:
        state_HVK: [H, V, K], float32.

    Returns:
        values: [H, V, K], int8; scales: [H, K], float32. The error of every element is at
        most half its scale. A channel of zeros has scale 0 and comes back as zeros.
    """
    scales_HK = state_HVK.abs().amax(dim=1) / _LEVELS
    safe_HK = torch.where(scales_HK > 0, scales_HK, torch.ones_like(scales_HK))
    values = torch.round(state_HVK / safe_HK[:, None, :]).clamp_(-_LEVELS, _LEVELS)
    return values.to(torch.int8), scales_HK


def decode(values_HVK: torch.Tensor, scales_HK: torch.Tensor) -> torch.Tensor:
    """The state that `encode` rounded: [H, V, K], float32."""
    return values_HVK.to(torch.float32) * scales_HK[:, None, :]
