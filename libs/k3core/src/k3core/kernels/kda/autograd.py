"""Kimi Delta Attention for training: the compiled recurrence with its gradients.

What comes before the recurrence (convolution, SiLU, norms, gates) is the reference's torch,
parallel over tokens and differentiated by torch; only the loop over tokens is compiled, in
both directions. States are kept every 32 tokens and recomputed between, so a pass over B
sequences of T tokens keeps B * H * T / 32 states.

Letters: B sequences, T tokens, H heads, K key width, V value width, W convolution taps.
"""

import ctypes
from typing import cast

import torch
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from k3core.kernels.interface import KdaInputs, KdaWeights
from k3core.kernels.kda.reference import prepare
from k3core.kernels.native.arguments import KdaTrainArgs
from k3core.kernels.native.compiled import Function, NativeLibrary, check

# As STRETCH in native/src/kda_train.c.
TOKENS_BETWEEN_STATES = 32


class NativeKdaDense:
    """`Kernels.kda_dense`: differentiable once, float32 inside."""

    def __init__(self, library: NativeLibrary) -> None:
        self._forward = library.entries["k3_kda_train_forward"]
        self._backward = library.entries["k3_kda_train_backward"]

    def run(self, inputs: KdaInputs, weights: KdaWeights) -> torch.Tensor:
        """Run [B, T] sequences from zero states.

        Returns:
            o: [B, T, H, V], float32.
        """
        num_heads, key_dim = inputs.gate.shape[-2:]
        num_channels, num_taps = weights.conv.shape
        value_dim = num_channels // num_heads - 2 * key_dim
        window = F.pad(inputs.qkv, (0, 0, num_taps - 1, 0))
        q, k, v, decay, beta = prepare(window, inputs.gate, inputs.beta, weights, value_dim)
        return self.recur(q, k, v, decay, beta)

    def recur(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        """The recurrence alone.

        Args:
            q: [B, T, H, K], float32, already scaled.
            k: [B, T, H, K].
            v: [B, T, H, V].
            decay: [B, T, H, K], in (0, 1]: not its logarithm.
            beta: [B, T, H].

        Returns:
            o: [B, T, H, V], float32.
        """
        # torch types apply() as returning anything.
        return cast(
            torch.Tensor, _Recurrence.apply(q, k, v, decay, beta, self._forward, self._backward)
        )


class _Recurrence(torch.autograd.Function):
    """The compiled forward and backward passes as one node of the graph."""

    # torch declares both passes with arguments of any kind; ours are spelled out.
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        forward: Function,
        backward: Function,
    ) -> torch.Tensor:
        dense = tuple(x.detach().contiguous() for x in (q, k, v, decay, beta))
        for x in dense:
            if x.dtype != torch.float32:
                raise TypeError(f"the compiled recurrence takes float32, not {x.dtype}")
        num_sequences, num_tokens, num_heads, key_dim = q.shape
        value_dim = v.shape[-1]
        stretches = -(-num_tokens // TOKENS_BETWEEN_STATES)
        kept = torch.empty(num_sequences, num_heads, stretches, key_dim, value_dim)
        o = torch.empty(v.shape)
        arguments = _arguments(dense, kept)
        arguments.o = o.data_ptr()
        check(forward(ctypes.addressof(arguments)))
        ctx.save_for_backward(*dense, kept)
        ctx.compiled_backward = backward  # type: ignore[attr-defined]  # a context holds anything
        return o

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx, d_o: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        *dense, kept = ctx.saved_tensors  # type: ignore[attr-defined]  # set by save_for_backward
        d_o = d_o.contiguous()
        grads = [torch.empty_like(x) for x in dense]
        arguments = _arguments(tuple(dense), kept)
        arguments.d_o = d_o.data_ptr()
        names = ("d_q", "d_k", "d_v", "d_decay", "d_beta")
        for name, grad in zip(names, grads, strict=True):
            setattr(arguments, name, grad.data_ptr())
        check(ctx.compiled_backward(ctypes.addressof(arguments)))  # type: ignore[attr-defined]
        return (*grads, None, None)


def _arguments(dense: tuple[torch.Tensor, ...], kept: torch.Tensor) -> KdaTrainArgs:
    """What both passes are told; the caller fills in the pointers of its own."""
    q, k, v, decay, beta = dense
    num_sequences, num_tokens, num_heads, key_dim = q.shape
    return KdaTrainArgs(
        q=q.data_ptr(),
        k=k.data_ptr(),
        decay=decay.data_ptr(),
        v=v.data_ptr(),
        beta=beta.data_ptr(),
        kept=kept.data_ptr(),
        B=num_sequences,
        T=num_tokens,
        H=num_heads,
        K=key_dim,
        V=v.shape[-1],
    )
