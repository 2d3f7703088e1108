"""Matrix products with stored weights through the native kernels.

A row's result has the same bits in a batch of any size.
"""

import ctypes

import torch

from k3core.kernels.native.arguments import LinearArgs
from k3core.kernels.native.compiled import NativeLibrary, check, rows_of, type_code


class NativeLinear:
    """`Kernels.linear`: float32 sums whatever x and the weights are stored in."""

    def __init__(self, library: NativeLibrary) -> None:
        self._linear = library.entries["k3_linear"]

    def run(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., I] with the transposed weight [O, I]: [..., O] in x's dtype.

        Raises:
            TypeError: x or the weight is neither float32 nor bfloat16.
            MemoryError: no memory for scratch.
        """
        num_outputs, num_inputs = weight.shape
        out_type, weight_type = type_code(x), type_code(weight)
        assert x.shape[-1] == num_inputs
        assert weight.stride(1) == 1 or num_inputs == 1
        out = torch.empty((*x.shape[:-1], num_outputs), dtype=x.dtype)
        rows = rows_of(x)
        if rows.dtype != torch.float32:
            rows = rows.float()
        arguments = LinearArgs(
            rows.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows.stride(0),
            weight.stride(0),
            num_outputs,
            rows.shape[0],
            num_outputs,
            num_inputs,
            weight_type,
            out_type,
        )
        check(self._linear(ctypes.addressof(arguments)))
        return out
