"""Kimi Delta Attention through the native kernels: one call a layer, prefill and decode.

A sequence's outputs and states have the same bits whatever else is in the batch, however its
tokens are cut into chunks, decode steps included, and whatever exports are taken.

Letters: B sequences, T tokens, H heads, K key width, V value width, W convolution taps,
Q = 2 * H * K + H * V channels of the convolution.
"""

import ctypes

import torch

from k3core.kernels.interface import KdaInputs, KdaPlan, KdaStates, KdaWeights
from k3core.kernels.native.arguments import KdaArgs
from k3core.kernels.native.compiled import (
    NativeLibrary,
    byte_array,
    check,
    long_array,
    type_code,
)


class NativeKda:
    """`Kernels.kda_prefill` and `Kernels.kda_decode`: the same work for any chunk lengths."""

    def __init__(self, library: NativeLibrary) -> None:
        self._kda = library.entries["k3_kda"]

    def run(
        self, inputs: KdaInputs, weights: KdaWeights, plan: KdaPlan, states: KdaStates
    ) -> torch.Tensor:
        """Run packed chunks through the layer, states in place; see `Kernels.kda_prefill`.

        Returns:
            o: [T, H, V], float32.

        Raises:
            TypeError: inputs or windows are neither float32 nor bfloat16.
            MemoryError: no memory for scratch.
        """
        num_tokens = plan.starts[-1]
        _, num_heads, value_dim, key_dim = states.recurrent.shape
        _check_layout(inputs, weights, states)
        o_THV = torch.empty(num_tokens, num_heads, value_dim)
        starts, pages, has_state = (
            long_array(plan.starts),
            long_array(plan.pages),
            byte_array(plan.has_state),
        )
        exports = long_array(tuple(x for export in sorted(plan.exports) for x in export))
        arguments = KdaArgs(
            inputs.qkv.data_ptr(),
            inputs.gate.data_ptr(),
            inputs.beta.data_ptr(),
            inputs.qkv.stride(0),
            *inputs.gate.stride()[:2],
            *inputs.beta.stride(),
            weights.conv.data_ptr(),
            weights.a_log.data_ptr(),
            weights.dt_bias.data_ptr(),
            ctypes.addressof(starts),
            ctypes.addressof(pages),
            ctypes.addressof(exports),
            ctypes.addressof(has_state),
            states.recurrent.data_ptr(),
            states.conv.data_ptr(),
            states.recurrent.stride(0),
            *states.conv.stride()[:2],
            o_THV.data_ptr(),
            len(plan.pages),
            len(plan.exports),
            num_heads,
            key_dim,
            value_dim,
            weights.conv.shape[1],
            type_code(inputs.qkv),
            type_code(states.conv),
            weights.lower_bound is not None,
            weights.lower_bound or 0.0,
        )
        check(self._kda(ctypes.addressof(arguments)))
        return o_THV


def _check_layout(inputs: KdaInputs, weights: KdaWeights, states: KdaStates) -> None:
    """What the pointers rely on; all of it holds by construction of model and cache."""
    _, num_heads, value_dim, key_dim = states.recurrent.shape
    assert states.recurrent.dtype == torch.float32
    assert states.recurrent.stride()[1:] == (value_dim * key_dim, key_dim, 1)
    assert states.conv.stride(2) == 1
    assert inputs.qkv.stride(1) == 1
    assert inputs.gate.stride(2) == 1
    assert inputs.qkv.shape[1] == num_heads * (2 * key_dim + value_dim)
    assert inputs.qkv.dtype == inputs.gate.dtype == inputs.beta.dtype
    assert weights.conv.is_contiguous()
    assert weights.dt_bias.is_contiguous()
    assert weights.conv.dtype == weights.a_log.dtype == weights.dt_bias.dtype == torch.float32
