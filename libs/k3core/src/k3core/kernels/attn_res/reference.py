"""The mixture over depth of Attention Residuals in plain torch.

Letters: T tokens, D width, S block snapshots.
"""

from collections.abc import Sequence

import torch

from k3core.kernels.norm.reference import rms_norm


def mix(
    x_TD: torch.Tensor, snapshots: Sequence[torch.Tensor], query_D: torch.Tensor, eps: float
) -> torch.Tensor:
    """Mix the block snapshots and the running stream by attention over depth.

    Keys are the sources scaled to unit mean square, values the sources themselves; scores
    have no 1/sqrt(D). Without snapshots the stream is returned as it is.

    Args:
        x_TD: the running stream, the last source.
        snapshots: S tensors [T, D], oldest first.
        query_D: float32, norm weight times projection weight.
        eps: of the keys' norm.

    Source: K3 architecture sheet, section 2.2.
    """
    if not snapshots:
        return x_TD
    sources = torch.stack([*snapshots, x_TD], dim=-2)
    wide = sources.to(torch.promote_types(x_TD.dtype, torch.float32))
    keys = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    weights = torch.softmax((keys * query_D).sum(-1), dim=-1)
    return (weights.unsqueeze(-1) * wide).sum(-2).to(x_TD.dtype)


def mix_norm(
    x_TD: torch.Tensor,
    snapshots: Sequence[torch.Tensor],
    query_D: torch.Tensor,
    mix_eps: float,
    weight_D: torch.Tensor,
    norm_eps: float,
) -> torch.Tensor:
    """`mix`, then the RMS norm that always follows it."""
    return rms_norm(mix(x_TD, snapshots, query_D, mix_eps), weight_D, norm_eps)
