"""Gated activations of the MLPs in plain torch."""

import torch

from k3core.kernels.interface import Activation


def activate(gate_up_TF2: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Apply SiTU or SiLU to [..., 2F] (gate | up); float32 inside, x's dtype outside.

    Source: K3 architecture sheet, section 2.5.
    """
    wide = gate_up_TF2.to(torch.promote_types(gate_up_TF2.dtype, torch.float32))
    gate, up = wide.chunk(2, dim=-1)
    if activation.beta is None:
        bounded = gate * torch.sigmoid(gate)
    else:
        bounded = activation.beta * torch.tanh(gate / activation.beta) * torch.sigmoid(gate)
    if activation.linear_beta is not None:
        up = activation.linear_beta * torch.tanh(up / activation.linear_beta)
    return (bounded * up).to(gate_up_TF2.dtype)
