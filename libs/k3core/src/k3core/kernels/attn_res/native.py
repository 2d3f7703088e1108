"""Attention Residuals through the native kernels; each row from itself alone, in float32."""

import ctypes
from collections.abc import Sequence

import torch

from k3core.kernels.native.arguments import MixArgs
from k3core.kernels.native.compiled import NativeLibrary, check, type_code


class NativeAttnRes:
    """`Kernels.attn_res_mix` and `Kernels.attn_res_norm`, the latter in one pass."""

    def __init__(self, library: NativeLibrary) -> None:
        self._attn_res = library.entries["k3_attn_res"]

    def mix(
        self,
        x_TD: torch.Tensor,
        snapshots: Sequence[torch.Tensor],
        query_D: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """See the reference; without snapshots x itself is returned."""
        if not snapshots:
            return x_TD
        return self._run((*snapshots, x_TD), query_D, eps, None, 0.0)

    def mix_norm(
        self,
        x_TD: torch.Tensor,
        snapshots: Sequence[torch.Tensor],
        query_D: torch.Tensor,
        mix_eps: float,
        weight_D: torch.Tensor,
        norm_eps: float,
    ) -> torch.Tensor:
        """`mix`, cast to x's dtype, then the RMS norm."""
        return self._run((*snapshots, x_TD), query_D, mix_eps, weight_D, norm_eps)

    def _run(
        self,
        sources: tuple[torch.Tensor, ...],
        query_D: torch.Tensor,
        mix_eps: float,
        weight_D: torch.Tensor | None,
        norm_eps: float,
    ) -> torch.Tensor:
        stream = sources[-1]
        assert query_D.dtype == torch.float32
        dense = tuple(source.contiguous() for source in sources)
        out = torch.empty(stream.shape, dtype=stream.dtype)
        pointers = (ctypes.c_void_p * len(dense))(*(source.data_ptr() for source in dense))
        arguments = MixArgs(
            ctypes.addressof(pointers),
            query_D.data_ptr(),
            None if weight_D is None else weight_D.data_ptr(),
            out.data_ptr(),
            len(dense),
            stream.numel() // stream.shape[-1],
            stream.shape[-1],
            type_code(stream),
            0 if weight_D is None else type_code(weight_D),
            mix_eps,
            norm_eps,
        )
        check(self._attn_res(ctypes.addressof(arguments)))
        return out
