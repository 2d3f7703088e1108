"""RMS norms through the native kernels; each row from itself alone, in float32."""

import ctypes

import torch

from k3core.kernels.native.arguments import GatedNormArgs, NormArgs
from k3core.kernels.native.compiled import NativeLibrary, check, rows_of, type_code


class NativeNorm:
    """`Kernels.rms_norm` and `Kernels.gated_rms_norm`."""

    def __init__(self, library: NativeLibrary) -> None:
        self._rms_norm = library.entries["k3_rms_norm"]
        self._gated_rms_norm = library.entries["k3_gated_rms_norm"]

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """See the reference: the cast to x's dtype comes before the weight."""
        rows = rows_of(x_TD)
        out = torch.empty(x_TD.shape, dtype=x_TD.dtype)
        arguments = NormArgs(
            rows.data_ptr(),
            weight_D.data_ptr(),
            out.data_ptr(),
            rows.stride(0),
            *rows.shape,
            type_code(rows),
            type_code(weight_D),
            eps,
        )
        check(self._rms_norm(ctypes.addressof(arguments)))
        return out

    def gated_rms_norm(
        self, o_THV: torch.Tensor, weight_V: torch.Tensor, gate_THV: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See the reference: norm, weight, then the sigmoid of the gate, all in float32."""
        assert o_THV.dtype == weight_V.dtype == torch.float32
        o_THV = o_THV.contiguous()
        if gate_THV.stride(-1) != 1 or gate_THV.dim() != 3:
            gate_THV = gate_THV.contiguous()
        out = torch.empty(gate_THV.shape, dtype=gate_THV.dtype)
        num_heads, value_dim = gate_THV.shape[-2:]
        arguments = GatedNormArgs(
            o_THV.data_ptr(),
            weight_V.data_ptr(),
            gate_THV.data_ptr(),
            out.data_ptr(),
            *gate_THV.stride()[-3:-1],
            gate_THV.numel() // (num_heads * value_dim),
            num_heads,
            value_dim,
            type_code(gate_THV),
            eps,
        )
        check(self._gated_rms_norm(ctypes.addressof(arguments)))
        return out
