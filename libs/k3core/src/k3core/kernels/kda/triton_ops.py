"""Kimi Delta Attention in Triton: prefill with exports and decode, states by page.

Three launches a layer. The first convolves (every token by itself) into a float32 scratch row;
the second runs the recurrence, one program for a tile of V of one head of one sequence, with
its state in registers, and writes live and exported pages where it meets them; with the third the
windows of the convolution move on, which nobody reads any more. No alignment of exports.

A program reads its own sequence only: a row does not depend on its batch.

Letters: B sequences, T tokens, H heads, K key width, V value width, W convolution taps,
Q = 2 * H * K + H * V channels of the convolution.
"""

# A launch gives plain numbers for parameters that the compiler holds as constants.
# pyright: reportArgumentType=false

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

from k3core.kernels.interface import KdaInputs, KdaPlan, KdaStates, KdaWeights
from k3core.kernels.kda.triton_kernels import convolve, move_windows, recur

# Channels of one program of the convolution.
CHANNEL_TILE = 256
# Elements of the state that one program of the recurrence holds.
STATE_TILE = 4096


@dataclass(frozen=True, slots=True)
class _Places:
    """A plan on the device: what all layers of a pass share.

    Attributes:
        starts: [B + 1], int32.
        has_state: [B], int32 flags.
        sequences: [T], int32: which sequence a packed row belongs to.
        export_starts: [B + 1], int32: exports of sequence b are export_starts[b] to [b + 1].
        exports: [E, 2], int32: tokens consumed, ascending within a sequence, and the page.
    """

    starts: torch.Tensor
    has_state: torch.Tensor
    sequences: torch.Tensor
    export_starts: torch.Tensor
    exports: torch.Tensor


class TritonKda:
    """`Kernels.kda_prefill` and `Kernels.kda_decode`: the same kernels for any lengths."""

    def run(
        self, inputs: KdaInputs, weights: KdaWeights, plan: KdaPlan, states: KdaStates
    ) -> torch.Tensor:
        """Run packed chunks through the layer, states in place; see `Kernels.kda_prefill`.

        Returns:
            o: [T, H, V], float32.
        """
        exports = tuple(sorted(plan.exports))
        places = _places(plan.starts, plan.has_state, exports, states.recurrent.device)
        mixed_TQ = _launch_convolve(inputs, weights, plan, states, places)
        o_THV = _launch_recur(mixed_TQ, inputs, weights, plan, states, places)
        _launch_windows(inputs, weights, plan, states, places)
        return o_THV


def _launch_convolve(
    inputs: KdaInputs,
    weights: KdaWeights,
    plan: KdaPlan,
    states: KdaStates,
    places: _Places,
) -> torch.Tensor:
    num_channels, num_taps = weights.conv.shape
    num_tokens = plan.starts[-1]
    window_page, window_row, _ = states.conv.stride()
    mixed_TQ = states.recurrent.new_empty(num_tokens, num_channels)
    convolve[(num_tokens, triton.cdiv(num_channels, CHANNEL_TILE))](
        inputs.qkv,
        states.conv,
        weights.conv,
        mixed_TQ,
        places.starts,
        places.sequences,
        plan.page_ids,
        places.has_state,
        inputs.qkv.stride(0),
        window_page,
        window_row,
        num_channels,
        TAPS=num_taps,
        TILE=CHANNEL_TILE,
    )
    return mixed_TQ


def _launch_recur(
    mixed_TQ: torch.Tensor,
    inputs: KdaInputs,
    weights: KdaWeights,
    plan: KdaPlan,
    states: KdaStates,
    places: _Places,
) -> torch.Tensor:
    _, num_heads, value_dim, key_dim = states.recurrent.shape
    gate_row, gate_head, _ = inputs.gate.stride()
    beta_row, beta_head = inputs.beta.stride()
    key_tile = triton.next_power_of_2(key_dim)
    value_tile = min(triton.next_power_of_2(value_dim), max(1, STATE_TILE // key_tile))
    o_THV = mixed_TQ.new_empty(mixed_TQ.shape[0], num_heads, value_dim)
    recur[(triton.cdiv(value_dim, value_tile), len(plan.pages) * num_heads)](
        mixed_TQ,
        inputs.gate,
        inputs.beta,
        weights.a_log,
        weights.dt_bias,
        states.recurrent,
        o_THV,
        places.starts,
        plan.page_ids,
        places.has_state,
        places.export_starts,
        places.exports,
        gate_row,
        gate_head,
        beta_row,
        beta_head,
        states.recurrent.stride(0),
        H=num_heads,
        K=key_dim,
        V=value_dim,
        KEY_TILE=key_tile,
        VALUE_TILE=value_tile,
        LOWER_BOUND=weights.lower_bound or 0.0,
    )
    return o_THV


def _launch_windows(
    inputs: KdaInputs,
    weights: KdaWeights,
    plan: KdaPlan,
    states: KdaStates,
    places: _Places,
) -> None:
    num_channels, num_taps = weights.conv.shape
    window_page, window_row, _ = states.conv.stride()
    move_windows[(len(plan.pages), triton.cdiv(num_channels, CHANNEL_TILE))](
        inputs.qkv,
        states.conv,
        places.starts,
        plan.page_ids,
        places.has_state,
        places.export_starts,
        places.exports,
        inputs.qkv.stride(0),
        window_page,
        window_row,
        num_channels,
        TAPS=num_taps,
        TILE=CHANNEL_TILE,
    )


@lru_cache(maxsize=8)
def _places(
    starts: tuple[int, ...],
    has_state: tuple[bool, ...],
    exports: tuple[tuple[int, int, int], ...],
    device: torch.device,
) -> _Places:
    """Put a plan on the device once for all layers; exports sorted by sequence and offset."""
    lengths = torch.tensor(starts).diff()
    counts = torch.zeros(len(starts), dtype=torch.int64)
    for sequence, _, _ in exports:
        counts[sequence + 1] += 1
    return _Places(
        starts=torch.tensor(starts, dtype=torch.int32).to(device),
        has_state=torch.tensor(has_state, dtype=torch.int32).to(device),
        sequences=torch.arange(len(lengths), dtype=torch.int32)
        .repeat_interleave(lengths)
        .to(device),
        export_starts=counts.cumsum(0).to(device, torch.int32),
        exports=torch.tensor([e[1:] for e in exports], dtype=torch.int32).to(device),
    )
