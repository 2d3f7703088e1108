"""Latent attention through the native kernels, absorbed and expanded, over paged rows.

In either form a query row has the same bits alone, in any batch and for any cut of its
chunk; the two forms differ by rounding.
"""

import ctypes

import torch

from k3core.kernels.interface import MlaPlan, MlaWeights
from k3core.kernels.native.arguments import MlaArgs, MlaWriteArgs
from k3core.kernels.native.compiled import Function, NativeLibrary, check, long_array, type_code


class NativeMla:
    """`Kernels.mla_write`, `Kernels.mla_prefill` and `Kernels.mla_decode`."""

    def __init__(self, library: NativeLibrary) -> None:
        self._absorbed = library.entries["k3_mla_absorbed"]
        self._expanded = library.entries["k3_mla_expanded"]
        self._write = library.entries["k3_mla_write"]

    def write(
        self,
        latent_PGUX: torch.Tensor,
        rows_TX: torch.Tensor,
        units_T: torch.Tensor,
        places_T: torch.Tensor,
    ) -> None:
        """Write packed rows to their places of the paged view, in the view's dtype."""
        assert latent_PGUX.stride(3) == 1
        assert rows_TX.stride(1) == 1
        units_T, places_T = units_T.long().contiguous(), places_T.long().contiguous()
        arguments = MlaWriteArgs(
            latent_PGUX.data_ptr(),
            rows_TX.data_ptr(),
            units_T.data_ptr(),
            places_T.data_ptr(),
            *latent_PGUX.stride()[:3],
            latent_PGUX.shape[1],
            rows_TX.stride(0),
            *rows_TX.shape,
            type_code(latent_PGUX),
            type_code(rows_TX),
        )
        check(self._write(ctypes.addressof(arguments)))

    def prefill(
        self, q_TNX: torch.Tensor, latent_PGUX: torch.Tensor, weights: MlaWeights, plan: MlaPlan
    ) -> torch.Tensor:
        """Attend in the expanded form; keys and values of one head live at a time."""
        return _attend(self._expanded, q_TNX, latent_PGUX, weights, plan)

    def decode(
        self, q_TNX: torch.Tensor, latent_PGUX: torch.Tensor, weights: MlaWeights, plan: MlaPlan
    ) -> torch.Tensor:
        """Attend in the absorbed form, straight from the cached rows."""
        return _attend(self._absorbed, q_TNX, latent_PGUX, weights, plan)


def _attend(
    function: Function,
    q_TNX: torch.Tensor,
    latent_PGUX: torch.Tensor,
    weights: MlaWeights,
    plan: MlaPlan,
) -> torch.Tensor:
    num_heads, query_dim = q_TNX.shape[1:]
    assert latent_PGUX.stride(3) == 1
    assert weights.kv_b.is_contiguous()
    q_TNX = q_TNX if q_TNX.stride(2) == 1 else q_TNX.contiguous()
    tables = plan.unit_tables.long().contiguous()
    starts, contexts = long_array(plan.starts), long_array(plan.contexts)
    out = torch.empty(q_TNX.shape[0], num_heads, weights.value_dim, dtype=q_TNX.dtype)
    arguments = MlaArgs(
        q_TNX.data_ptr(),
        latent_PGUX.data_ptr(),
        weights.kv_b.data_ptr(),
        ctypes.addressof(starts),
        ctypes.addressof(contexts),
        tables.data_ptr(),
        out.data_ptr(),
        *q_TNX.stride()[:2],
        *latent_PGUX.stride()[:3],
        tables.stride(0),
        len(plan.contexts),
        num_heads,
        weights.key_dim,
        query_dim - weights.key_dim,
        weights.value_dim,
        weights.kv_b.shape[1],
        *latent_PGUX.shape[1:3],
        type_code(q_TNX),
        type_code(latent_PGUX),
        type_code(weights.kv_b),
        weights.scale,
    )
    check(function(ctypes.addressof(arguments)))
    return out
