"""Routing and routed experts in plain torch.

Letters: T tokens, E experts, k experts a token, L expert width, F middle width.
"""

import torch

from k3core.kernels.interface import Activation, ExpertWeights, RouterRule
from k3core.kernels.mxfp4.reference import dequantise
from k3core.kernels.situ.reference import activate

# Source: K3 architecture sheet, section 2.6: keeps the renormalisation finite.
WEIGHT_SUM_FLOOR = 1e-20


def route(
    logits_TE: torch.Tensor, bias_E: torch.Tensor | None, rule: RouterRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts and their weights; the bias takes part in the choice only.

    Args:
        logits_TE: float32.
        bias_E: float32 selection bias, or None.
        rule: how many, from which groups, how weighted.

    Returns:
        ids [T, k] int64 and weights [T, k] in the dtype of the logits.

    Source: K3 architecture sheet, section 2.6; groups as in DeepSeek-V3's noaux_tc: the sum
    of a group's two best biased scores ranks it.
    """
    scores = logits_TE.sigmoid() if rule.score == "sigmoid" else logits_TE.softmax(-1)
    choice = scores if bias_E is None else scores + bias_E
    if rule.groups_per_token < rule.num_groups:
        grouped = choice.unflatten(-1, (rule.num_groups, -1))
        rank = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        best = rank.topk(rule.groups_per_token, dim=-1).indices
        is_open = torch.zeros_like(rank, dtype=torch.bool).scatter(-1, best, True)
        choice = grouped.masked_fill(~is_open.unsqueeze(-1), float("-inf")).flatten(-2)
    ids = choice.topk(rule.experts_per_token, dim=-1).indices
    weights = scores.gather(-1, ids)
    if rule.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + WEIGHT_SUM_FLOOR)
    return ids, weights * rule.scaling_factor


def experts(
    x_TL: torch.Tensor,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation,
) -> torch.Tensor:
    """Sum the chosen experts' outputs, one active expert after the other, in float32.

    A packed expert is unpacked to x's dtype while it is used and forgotten after. Sums over
    experts run in ascending expert id, so a token's result does not depend on its batch
    beyond the rounding of the matrix products.
    """
    total = torch.zeros(
        x_TL.shape, dtype=torch.promote_types(x_TL.dtype, torch.float32), device=x_TL.device
    )
    # The host needs the list of active experts to unpack only those.
    for expert in ids_Tk.unique().tolist():
        tokens, slots = torch.where(ids_Tk == expert)
        w13 = _expert(weights.w13, weights.w13_scale, expert, weights.group, x_TL.dtype)
        w2 = _expert(weights.w2, weights.w2_scale, expert, weights.group, x_TL.dtype)
        middle = activate(x_TL[tokens] @ w13.T, activation)
        share = (middle @ w2.T).to(total.dtype) * weights_Tk[tokens, slots].unsqueeze(-1)
        total = total.index_add(0, tokens, share.to(total.dtype))
    return total.to(x_TL.dtype)


def _expert(
    weight: torch.Tensor, scale: torch.Tensor | None, expert: int, group: int, dtype: torch.dtype
) -> torch.Tensor:
    if scale is None:
        return weight[expert].to(dtype)
    return dequantise(weight[expert], scale[expert], group, dtype)
