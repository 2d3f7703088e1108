"""Kimi Delta Attention in plain torch: a loop over tokens, exact for any gate.

Letters: B sequences, T tokens, H heads, K key width, V value width, W convolution taps,
Q = 2 * H * K + H * V channels of the convolution.

Source: K3 architecture sheet, section 2.3; KDA kernel notes, section 0.
"""

import torch
from torch.nn import functional as F

from k3core.kernels.interface import KdaInputs, KdaPlan, KdaStates, KdaWeights

# Added to the sum of squares under the root of q's and k's norms.
L2_NORM_EPS = 1e-6


def prefill(
    inputs: KdaInputs, weights: KdaWeights, plan: KdaPlan, states: KdaStates
) -> torch.Tensor:
    """Run packed chunks through the layer, states in place; see `Kernels.kda_prefill`.

    Returns:
        o: [T, H, V], float32 (float64 for float64 inputs).
    """
    _, num_heads, value_dim, _ = states.recurrent.shape
    wide = torch.promote_types(inputs.qkv.dtype, torch.float32)
    o_THV = inputs.qkv.new_empty(plan.starts[-1], num_heads, value_dim, dtype=wide)
    for sequence, page in enumerate(plan.pages):
        rows = slice(plan.starts[sequence], plan.starts[sequence + 1])
        history = states.conv[page]
        state = states.recurrent[page].to(wide)
        if not plan.has_state[sequence]:
            history, state = torch.zeros_like(history), torch.zeros_like(state)
        window = torch.cat((history.to(inputs.qkv.dtype), inputs.qkv[rows]))
        q, k, v, decay, beta = prepare(
            window, inputs.gate[rows], inputs.beta[rows], weights, value_dim
        )
        exports = {offset: dst for row, offset, dst in plan.exports if row == sequence}
        for t in range(rows.stop - rows.start):
            state, o = _step(state, q[t], k[t], v[t], decay[t], beta[t])
            o_THV[rows.start + t] = o
            if t + 1 in exports:
                _store(states, exports[t + 1], state, window, t + 1)
        _store(states, page, state, window, rows.stop - rows.start)
    return o_THV


def decode(
    inputs: KdaInputs, weights: KdaWeights, plan: KdaPlan, states: KdaStates
) -> torch.Tensor:
    """One token for each of B sequences at once; see `Kernels.kda_decode`."""
    value_dim = states.recurrent.shape[2]
    wide = torch.promote_types(inputs.qkv.dtype, torch.float32)
    has_state = plan.state_mask
    history = states.conv[plan.page_ids].to(inputs.qkv.dtype)
    history = torch.where(has_state[:, None, None], history, 0)
    state = states.recurrent[plan.page_ids].to(wide)
    state = torch.where(has_state[:, None, None, None], state, 0)
    window = torch.cat((history, inputs.qkv.unsqueeze(1)), dim=1)
    q, k, v, decay, beta = (
        x.squeeze(1)
        for x in prepare(
            window, inputs.gate.unsqueeze(1), inputs.beta.unsqueeze(1), weights, value_dim
        )
    )
    state, o_THV = _step(state, q, k, v, decay, beta)
    states.recurrent[plan.page_ids] = state.to(states.recurrent.dtype)
    states.conv[plan.page_ids] = window[:, 1:].to(states.conv.dtype)
    return o_THV


def dense(inputs: KdaInputs, weights: KdaWeights) -> torch.Tensor:
    """Run [B, T] sequences from zero states without a cache; differentiable.

    Returns:
        o: [B, T, H, V], float32.
    """
    num_heads, key_dim = inputs.gate.shape[-2:]
    num_channels, num_taps = weights.conv.shape
    value_dim = num_channels // num_heads - 2 * key_dim
    window = F.pad(inputs.qkv, (0, 0, num_taps - 1, 0))
    q, k, v, decay, beta = prepare(window, inputs.gate, inputs.beta, weights, value_dim)
    state = v.new_zeros(v.shape[0], num_heads, value_dim, key_dim)
    outputs: list[torch.Tensor] = []
    for t in range(v.shape[1]):
        state, o = _step(state, q[:, t], k[:, t], v[:, t], decay[:, t], beta[:, t])
        outputs.append(o)
    return torch.stack(outputs, dim=1)


def log_decay(
    gate_THK: torch.Tensor, weights: KdaWeights, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The log of each key channel's decay, <= 0, [..., H, K]."""
    shifted = gate_THK.to(dtype) + weights.dt_bias
    rate = weights.a_log.to(dtype).exp().unsqueeze(-1)
    if weights.lower_bound is not None:
        return weights.lower_bound * torch.sigmoid(rate * shifted)
    return -rate * F.softplus(shifted)


def prepare(
    window: torch.Tensor,
    gate_THK: torch.Tensor,
    beta_TH: torch.Tensor,
    weights: KdaWeights,
    value_dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Everything before the recurrence: q (scaled), k, v, decay (not log) and beta.

    Args:
        window: [..., W - 1 + T, Q], the convolution's history, then the chunk.
        gate_THK: [..., T, H, K].
        beta_TH: [..., T, H].
        weights: of the layer.
        value_dim: V.
    """
    num_heads, key_dim = gate_THK.shape[-2:]
    num_taps = weights.conv.shape[1]
    num_tokens = gate_THK.shape[-3]
    wide = window.to(torch.promote_types(window.dtype, torch.float32))
    taps = [wide[..., tap : tap + num_tokens, :] * weights.conv[:, tap] for tap in range(num_taps)]
    mixed = torch.stack(taps).sum(0)
    widths = (num_heads * key_dim, num_heads * key_dim, num_heads * value_dim)
    q, k, v = (x.unflatten(-1, (num_heads, -1)) for x in F.silu(mixed).split(widths, dim=-1))
    q = _l2_norm(q) * key_dim**-0.5
    beta = torch.sigmoid(beta_TH.to(wide.dtype))
    return q, _l2_norm(k), v, log_decay(gate_THK, weights, wide.dtype).exp(), beta


def _step(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: state [..., H, V, K]; q, k, decay [..., H, K]; v [..., H, V]; beta [..., H]."""
    state = state * decay.unsqueeze(-2)
    seen = (state * k.unsqueeze(-2)).sum(-1)
    written = beta.unsqueeze(-1) * (v - seen)
    state = state + written.unsqueeze(-1) * k.unsqueeze(-2)
    return state, (state * q.unsqueeze(-2)).sum(-1)


def _store(
    states: KdaStates, page: int, state: torch.Tensor, window: torch.Tensor, consumed: int
) -> None:
    """Write both states after `consumed` tokens of a chunk; window starts with the history."""
    num_kept = states.conv.shape[1]
    states.recurrent[page] = state.to(states.recurrent.dtype)
    states.conv[page] = window[consumed : consumed + num_kept].to(states.conv.dtype)


def _l2_norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_NORM_EPS)
