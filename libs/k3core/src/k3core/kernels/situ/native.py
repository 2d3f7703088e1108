"""The gated activation through the native kernels; each row from itself alone, in float32."""

import ctypes

import torch

from k3core.kernels.interface import Activation
from k3core.kernels.native.arguments import ActivateArgs, ActivationArgs
from k3core.kernels.native.compiled import NativeLibrary, check, rows_of, type_code


def activation_args(activation: Activation) -> ActivationArgs:
    """The bounds as the C sources want them: 0 for none."""
    return ActivationArgs(activation.beta or 0.0, activation.linear_beta or 0.0)


class NativeActivation:
    """`Kernels.activate`."""

    def __init__(self, library: NativeLibrary) -> None:
        self._activate = library.entries["k3_activate"]

    def run(self, gate_up_TF2: torch.Tensor, activation: Activation) -> torch.Tensor:
        """SiTU or SiLU of [..., 2F] (gate | up): [..., F] in its dtype."""
        rows = rows_of(gate_up_TF2)
        width = rows.shape[1] // 2
        out = torch.empty((*gate_up_TF2.shape[:-1], width), dtype=gate_up_TF2.dtype)
        arguments = ActivateArgs(
            rows.data_ptr(),
            out.data_ptr(),
            rows.stride(0),
            rows.shape[0],
            width,
            type_code(rows),
            activation_args(activation),
        )
        check(self._activate(ctypes.addressof(arguments)))
        return out
