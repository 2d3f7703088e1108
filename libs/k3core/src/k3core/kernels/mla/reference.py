"""Latent attention without positions, expanded and absorbed, in plain torch.

Both forms read the same cached rows [latent C | shared key R] by unit table and give the same
result up to rounding: the expanded one builds keys and values of every head, the absorbed one
moves `kv_b` to the query and to the result.

Letters: T query rows, N heads, K key width from the latent, R shared key width, V value width,
C latent width, X = C + R, P pages, U tokens a unit, J cached tokens.

Source: K3 architecture sheet, section 2.4.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch

from k3core.kernels.interface import MlaPlan, MlaWeights

# (query rows, cached rows, weights, context) -> values, all in one wide dtype.
_Attend: TypeAlias = Callable[[torch.Tensor, torch.Tensor, MlaWeights, int], torch.Tensor]

# Query rows attended at once: bounds the [N, rows, J] scores of a long prompt.
QUERY_TILE = 256


def write(
    latent_PGUX: torch.Tensor, rows_TX: torch.Tensor, units_T: torch.Tensor, places_T: torch.Tensor
) -> None:
    """Write packed rows to their places of the paged view, in the view's dtype."""
    page_units = latent_PGUX.shape[1]
    pages = torch.div(units_T, page_units, rounding_mode="floor")
    latent_PGUX[pages, units_T % page_units, places_T] = rows_TX.to(latent_PGUX.dtype)


def prefill(
    q_TNX: torch.Tensor, latent_PGUX: torch.Tensor, weights: MlaWeights, plan: MlaPlan
) -> torch.Tensor:
    """Attend in the expanded form; any chunk lengths; softmax and sums in float32."""
    return _attend_chunks(q_TNX, latent_PGUX, weights, plan, _attend_expanded)


def decode(
    q_TNX: torch.Tensor, latent_PGUX: torch.Tensor, weights: MlaWeights, plan: MlaPlan
) -> torch.Tensor:
    """Attend in the absorbed form; any chunk lengths; softmax and sums in float32."""
    return _attend_chunks(q_TNX, latent_PGUX, weights, plan, _attend_absorbed)


def dense(q_BTNX: torch.Tensor, rows_BTX: torch.Tensor, weights: MlaWeights) -> torch.Tensor:
    """Attend causally within each row of a batch, without a cache; differentiable."""
    return torch.stack(
        [
            _attend_expanded(q.to(_wide(q)), rows.to(_wide(q)), weights, 0)
            for q, rows in zip(q_BTNX, rows_BTX, strict=True)
        ]
    ).to(q_BTNX.dtype)


def _attend_chunks(
    q_TNX: torch.Tensor,
    latent_PGUX: torch.Tensor,
    weights: MlaWeights,
    plan: MlaPlan,
    attend: _Attend,
) -> torch.Tensor:
    out_TNV = q_TNX.new_empty(*q_TNX.shape[:2], weights.value_dim)
    for sequence, context in enumerate(plan.contexts):
        start, end = plan.starts[sequence], plan.starts[sequence + 1]
        rows_JX = _gather(latent_PGUX, plan.unit_tables[sequence], context + end - start)
        rows_JX = rows_JX.to(_wide(q_TNX))
        for low in range(start, end, QUERY_TILE):
            high = min(low + QUERY_TILE, end)
            seen = context + high - start
            q = q_TNX[low:high].to(rows_JX.dtype)
            out = attend(q, rows_JX[:seen], weights, context + low - start)
            out_TNV[low:high] = out.to(out_TNV.dtype)
    return out_TNV


def _gather(latent_PGUX: torch.Tensor, units: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The first `num_tokens` cached rows of one sequence, in order."""
    page_units, unit_tokens = latent_PGUX.shape[1:3]
    units = units[: -(-num_tokens // unit_tokens)].long()
    pages = torch.div(units, page_units, rounding_mode="floor")
    return latent_PGUX[pages, units % page_units].flatten(0, 1)[:num_tokens]


def _attend_expanded(
    q_TNX: torch.Tensor, rows_JX: torch.Tensor, weights: MlaWeights, context: int
) -> torch.Tensor:
    """Attend query rows at positions context, context + 1, ... to J rows; float32."""
    key_NKC, value_NVC = _split(weights, rows_JX.dtype)
    latent = rows_JX[:, : key_NKC.shape[-1]]
    shared = rows_JX[:, key_NKC.shape[-1] :]
    keys = torch.einsum("jc,nkc->jnk", latent, key_NKC)
    keys = torch.cat((keys, shared.unsqueeze(1).expand(-1, keys.shape[1], -1)), dim=-1)
    values = torch.einsum("jc,nvc->jnv", latent, value_NVC)
    scores = torch.einsum("tnx,jnx->ntj", q_TNX, keys) * weights.scale
    return torch.einsum("ntj,jnv->tnv", _softmax_causal(scores, context), values)


def _attend_absorbed(
    q_TNX: torch.Tensor, rows_JX: torch.Tensor, weights: MlaWeights, context: int
) -> torch.Tensor:
    """The same as `_attend_expanded` without building keys or values."""
    key_NKC, value_NVC = _split(weights, rows_JX.dtype)
    latent = rows_JX[:, : key_NKC.shape[-1]]
    moved = torch.einsum("tnk,nkc->tnc", q_TNX[..., : weights.key_dim], key_NKC)
    queries = torch.cat((moved, q_TNX[..., weights.key_dim :]), dim=-1)
    scores = torch.einsum("tnx,jx->ntj", queries, rows_JX) * weights.scale
    mixed = torch.einsum("ntj,jc->tnc", _softmax_causal(scores, context), latent)
    return torch.einsum("tnc,nvc->tnv", mixed, value_NVC)


def _split(weights: MlaWeights, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Per head: key rows [N, K, C] and value rows [N, V, C]."""
    per_head = weights.kv_b.unflatten(0, (-1, weights.key_dim + weights.value_dim)).to(dtype)
    return per_head[:, : weights.key_dim], per_head[:, weights.key_dim :]


def _softmax_causal(scores_NTJ: torch.Tensor, context: int) -> torch.Tensor:
    num_rows, num_seen = scores_NTJ.shape[-2:]
    positions = torch.arange(num_rows, device=scores_NTJ.device) + context
    hidden = torch.arange(num_seen, device=scores_NTJ.device) > positions.unsqueeze(-1)
    return torch.softmax(scores_NTJ.masked_fill(hidden, float("-inf")), dim=-1)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
