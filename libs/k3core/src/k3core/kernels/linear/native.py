"""Matrix products with stored weights through the native kernels.

A row's result has the same bits in a batch of any size. Weights that were prepared are kept a
second time, in panels: a product with many rows is faster by a sixth to a third, with one row
no slower, and the memory of these weights doubles (routed experts are not among them).
"""

import ctypes
import weakref

import torch

from k3core.kernels.native.arguments import LinearArgs
from k3core.kernels.native.compiled import NativeLibrary, check, rows_of, type_code

# Weight rows side by side in a panel, as in panel.h.
PANEL = 16
_NOT_PREPARED = (0, None)


class NativeLinear:
    """`Kernels.linear`: float32 sums whatever x and the weights are stored in."""

    def __init__(self, library: NativeLibrary) -> None:
        self._linear = library.entries["k3_linear"]
        self._linear_panels = library.entries["k3_linear_panels"]
        # By the identity of the weight, for as long as it lives: where its elements lay when it
        # was prepared, and the panels.
        self._panels: dict[int, tuple[int, torch.Tensor]] = {}

    def prepare(self, weight: torch.Tensor) -> None:
        """Keep a weight [O, I] in panels too; it must not change any more.

        A weight that is given other memory (another dtype, say) counts as not prepared from then
        on. Weights that `run` would refuse are left alone, so that it can say why.
        """
        if weight.dtype not in (torch.float32, torch.bfloat16):
            return
        if id(weight) not in self._panels:
            weakref.finalize(weight, self._panels.pop, id(weight), None)
        self._panels[id(weight)] = weight.data_ptr(), in_panels(weight.detach())

    @property
    def num_prepared(self) -> int:
        """Weights that are kept in panels now."""
        return len(self._panels)

    def run(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., I] with the transposed weight [O, I]: [..., O] in x's dtype.

        Raises:
            TypeError: x or the weight is neither float32 nor bfloat16.
            MemoryError: no memory for scratch.
        """
        num_outputs, num_inputs = weight.shape
        out_type, weight_type = type_code(x), type_code(weight)
        assert x.shape[-1] == num_inputs
        out = torch.empty((*x.shape[:-1], num_outputs), dtype=x.dtype)
        rows = rows_of(x)
        if rows.dtype != torch.float32:
            rows = rows.float()
        elements = weight.data_ptr()
        prepared_elements, panels = self._panels.get(id(weight), _NOT_PREPARED)
        if panels is None or prepared_elements != elements:
            assert weight.stride(1) == 1 or num_inputs == 1
            entry = self._linear
        else:
            entry, elements = self._linear_panels, panels.data_ptr()
        arguments = LinearArgs(
            rows.data_ptr(),
            elements,
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
        check(entry(ctypes.addressof(arguments)))
        return out


def in_panels(weight: torch.Tensor) -> torch.Tensor:
    """A weight [O, I] as [ceil(O / PANEL), I, PANEL], zeros behind its last row."""
    missing = -weight.shape[0] % PANEL
    padded = torch.nn.functional.pad(weight, (0, 0, 0, missing))
    return padded.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
