"""The two feed-forward parts: a dense gated MLP, and the (latent) mixture of experts.

Letters: T tokens, D model width, L expert width (latent or D), F middle width, E experts.

Source: K3 architecture sheet, sections 2.5 and 2.6.
"""

import torch
from torch import nn

from k3core.config import MoeConfig, TextConfig
from k3core.kernels.interface import Activation, ExpertWeights, Kernels, RouterRule

E2M1_PER_BYTE = 2


class DenseMlp(nn.Module):
    """down(activation(gate x, up x)); `gate_up` stacks the rows of gate and up."""

    def __init__(self, config: TextConfig, width: int, kernels: Kernels) -> None:
        super().__init__()
        self._kernels = kernels
        self._activation = activation_of(config)
        self.gate_up = nn.Parameter(torch.empty(2 * width, config.hidden_size))
        self.down = nn.Parameter(torch.empty(config.hidden_size, width))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Map [..., D] to [..., D]."""
        linear = self._kernels.linear
        middle = self._kernels.activate(linear(x_TD, self.gate_up), self._activation)
        return linear(middle, self.down)


class MoeMlp(nn.Module):
    """Router, routed experts at latent (or model) width, and the always-on shared MLP.

    Routed weights are uint8 where the checkpoint packs them and stay so. The router and its
    selection bias work in float32.
    """

    def __init__(self, config: TextConfig, moe: MoeConfig, kernels: Kernels) -> None:
        super().__init__()
        self._kernels = kernels
        self._eps = config.rms_norm_eps
        self._activation = activation_of(config)
        self._group = moe.mxfp4_group
        self._rule = RouterRule(
            experts_per_token=moe.experts_per_token,
            score=moe.router_score,
            num_groups=moe.num_groups,
            groups_per_token=moe.groups_per_token,
            renormalize=moe.renormalize,
            scaling_factor=moe.scaling_factor,
        )
        hidden = config.hidden_size
        self.router = nn.Parameter(torch.empty(moe.num_experts, hidden))
        self.router_bias = nn.Parameter(
            torch.empty(moe.num_experts, dtype=torch.float32), requires_grad=False
        )
        latent = moe.latent_size
        self.latent_down = None if latent is None else nn.Parameter(torch.empty(latent, hidden))
        self.latent_up = None if latent is None else nn.Parameter(torch.empty(hidden, latent))
        self.latent_norm = nn.Parameter(torch.empty(latent or 0)) if moe.has_latent_norm else None
        width, middle = latent or hidden, moe.intermediate_size
        self.w13, self.w13_scale = _expert_weights(moe, 2 * middle, width)
        self.w2, self.w2_scale = _expert_weights(moe, width, middle)
        shared = moe.num_shared_experts * moe.intermediate_size
        self.shared = DenseMlp(config, shared, kernels) if shared else None

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Map [T, D] to [T, D]."""
        kernels = self._kernels
        logits = kernels.linear(x_TD.float(), self.router.float())
        ids, weights = kernels.route(logits, self.router_bias, self._rule)
        z = x_TD if self.latent_down is None else kernels.linear(x_TD, self.latent_down)
        y = kernels.experts(z, ids, weights, self._experts(), self._activation)
        if self.latent_norm is not None:
            y = kernels.rms_norm(y, self.latent_norm, self._eps)
        if self.latent_up is not None:
            y = kernels.linear(y, self.latent_up)
        return y if self.shared is None else y + self.shared(x_TD)

    def _experts(self) -> ExpertWeights:
        return ExpertWeights(
            w13=self.w13,
            w13_scale=self.w13_scale,
            w2=self.w2,
            w2_scale=self.w2_scale,
            group=self._group or 0,
        )


def activation_of(config: TextConfig) -> Activation:
    """The gated activation that all MLPs of a model share."""
    if config.activation == "silu":
        return Activation(beta=None, linear_beta=None)
    return Activation(beta=config.situ_beta, linear_beta=config.situ_linear_beta)


def _expert_weights(
    moe: MoeConfig, rows: int, columns: int
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Weights [E, rows, columns], plain, or packed with their scales."""
    experts, group = moe.num_experts, moe.mxfp4_group
    if group is None:
        return nn.Parameter(torch.empty(experts, rows, columns)), None
    packed = torch.empty(experts, rows, columns // E2M1_PER_BYTE, dtype=torch.uint8)
    scale = torch.empty(experts, rows, columns // group, dtype=torch.uint8)
    return (
        nn.Parameter(packed, requires_grad=False),
        nn.Parameter(scale, requires_grad=False),
    )
