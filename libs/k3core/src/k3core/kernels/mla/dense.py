"""Latent attention over whole sequences for training, without scores in memory.

Letters: B sequences, T tokens, N heads, K key width from the latent, R shared key width,
V value width, C latent width.
"""

import torch
from torch.nn import functional as F

from k3core.kernels.interface import MlaWeights


def fused_dense(q_BTNX: torch.Tensor, rows_BTX: torch.Tensor, weights: MlaWeights) -> torch.Tensor:
    """`Kernels.mla_dense` through torch's fused attention.

    Args:
        q_BTNX: [B, T, N, K + R].
        rows_BTX: [B, T, C + R].
        weights: of the layer.

    Returns:
        [B, T, N, V] in q's dtype.
    """
    num_heads = q_BTNX.shape[-2]
    rope_dim = q_BTNX.shape[-1] - weights.key_dim
    latent, shared = rows_BTX.split((rows_BTX.shape[-1] - rope_dim, rope_dim), dim=-1)
    per_head = F.linear(latent, weights.kv_b).unflatten(-1, (num_heads, -1))
    keys, values = per_head.split((weights.key_dim, weights.value_dim), dim=-1)
    shared = shared.unsqueeze(-2).expand(*keys.shape[:-1], rope_dim)
    keys = torch.cat((keys, shared), dim=-1)
    query, key, value = (x.transpose(1, 2) for x in (q_BTNX, keys, values))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=weights.scale)
    return out.transpose(1, 2)
