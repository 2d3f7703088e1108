"""The backend for CUDA devices: KDA by Triton, the rest by torch."""

import importlib
from dataclasses import replace

import torch

from k3core.kernels.errors import BackendUnavailableError
from k3core.kernels.interface import Kernels


def build(base: Kernels) -> Kernels:
    """Replace KDA's prefill and decode.

    Raises:
        BackendUnavailableError: no CUDA device, or Triton is not installed.
    """
    if not torch.cuda.is_available():
        raise BackendUnavailableError("no CUDA device")
    try:
        # Imported only when wanted: Triton is no dependency of a CPU installation.
        triton_ops = importlib.import_module("k3core.kernels.kda.triton_ops")
    except ImportError as error:
        raise BackendUnavailableError(f"triton: {error}") from error
    kda = triton_ops.TritonKda()
    return replace(
        base,
        name="cuda-triton",
        reason="KDA by Triton, the rest by torch",
        kda_prefill=kda.run,
        kda_decode=kda.run,
    )
