"""RMS norms in plain torch: the truth that faster forms are tested against.

Letters: T tokens, D width, H heads, V value width.
"""

import torch


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale rows to unit mean square, cast back, then weigh.

    The cast comes before the weight, as in the vendor's code; the result has x's dtype.

    Source: K3 architecture sheet, section 2.1.
    """
    x32 = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
    unit = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (weight_D * unit.to(x_TD.dtype)).to(x_TD.dtype)


def gated_rms_norm(
    o_THV: torch.Tensor, weight_V: torch.Tensor, gate_THV: torch.Tensor, eps: float
) -> torch.Tensor:
    """Norm each head's output, weigh it, then gate it with a sigmoid, all in float32.

    Returns:
        [T, H, V] in the dtype of the gate.

    Source: K3 architecture sheet, section 2.3, step 7.
    """
    unit = o_THV * torch.rsqrt(o_THV.square().mean(-1, keepdim=True) + eps)
    gate = torch.sigmoid(gate_THV.to(o_THV.dtype))
    return (weight_V * unit * gate).to(gate_THV.dtype)
