"""Routing and routed experts through the native kernels.

A token's result has the same bits in any batch: scores and choice come from its own logits
(of equal scores the lower id wins), and its experts' shares are added in the order of its ids.
Middle rows stay float32 where the reference rounds them to x's dtype.
"""

import ctypes

import torch

from k3core.kernels.interface import Activation, ExpertWeights, RouterRule
from k3core.kernels.native.arguments import ExpertArgs, RouteArgs
from k3core.kernels.native.compiled import NativeLibrary, check, rows_of, type_code
from k3core.kernels.situ.native import activation_args

MXFP4_CODE = 2
# Elements that the kernel unpacks at a time; a group is a multiple.
UNPACKED_TOGETHER = 16


class NativeMoe:
    """`Kernels.route` and `Kernels.experts`."""

    def __init__(self, library: NativeLibrary) -> None:
        self._route = library.entries["k3_route"]
        self._experts = library.entries["k3_experts"]

    def route(
        self, logits_TE: torch.Tensor, bias_E: torch.Tensor | None, rule: RouterRule
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids [T, k] int64, best first, and weights [T, k] float32; see `RouterRule`."""
        assert logits_TE.dtype == torch.float32
        assert bias_E is None or bias_E.dtype == torch.float32
        logits_TE = logits_TE.contiguous()
        shape = (logits_TE.shape[0], rule.experts_per_token)
        ids, weights = torch.empty(shape, dtype=torch.int64), torch.empty(shape)
        arguments = RouteArgs(
            logits_TE.data_ptr(),
            None if bias_E is None else bias_E.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            *logits_TE.shape,
            rule.experts_per_token,
            rule.num_groups,
            rule.groups_per_token,
            rule.score == "softmax",
            rule.renormalize,
            rule.scaling_factor,
        )
        check(self._route(ctypes.addressof(arguments)))
        return ids, weights

    def experts(
        self,
        x_TL: torch.Tensor,
        ids_Tk: torch.Tensor,
        weights_Tk: torch.Tensor,
        weights: ExpertWeights,
        activation: Activation,
    ) -> torch.Tensor:
        """The weighted sum over the chosen experts: [T, L] in x's dtype.

        Raises:
            TypeError: x or plain weights are neither float32 nor bfloat16.
            MemoryError: no memory for scratch.
        """
        rows = rows_of(x_TL)
        ids_Tk, weights_Tk = ids_Tk.contiguous(), weights_Tk.contiguous()
        assert weights_Tk.dtype == torch.float32
        num_experts, middle2, _ = weights.w13.shape
        _check_weights(weights, rows.shape[1], middle2 // 2)
        out = torch.empty(rows.shape, dtype=x_TL.dtype)
        packed = weights.w13_scale is not None
        arguments = ExpertArgs(
            rows.data_ptr(),
            ids_Tk.data_ptr(),
            weights_Tk.data_ptr(),
            weights.w13.data_ptr(),
            weights.w2.data_ptr(),
            None if weights.w13_scale is None else weights.w13_scale.data_ptr(),
            None if weights.w2_scale is None else weights.w2_scale.data_ptr(),
            out.data_ptr(),
            rows.stride(0),
            *ids_Tk.shape,
            num_experts,
            rows.shape[1],
            middle2 // 2,
            weights.group,
            type_code(rows),
            MXFP4_CODE if packed else type_code(weights.w13),
            type_code(out),
            activation_args(activation),
        )
        check(self._experts(ctypes.addressof(arguments)))
        return out


def _check_weights(weights: ExpertWeights, width: int, middle: int) -> None:
    assert weights.w13.is_contiguous()
    assert weights.w2.is_contiguous()
    if weights.w13_scale is None:
        assert weights.w13.shape[2] == width
        assert weights.w13.dtype == weights.w2.dtype
        return
    assert weights.w13.shape[2] * 2 == width
    assert weights.group % UNPACKED_TOGETHER == 0
    assert width % weights.group == 0
    assert middle % weights.group == 0
    assert weights.w13_scale.is_contiguous()
    assert weights.w2_scale is not None
    assert weights.w2_scale.is_contiguous()
