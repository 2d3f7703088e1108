"""The backend for processors without a C compiler: KDA by numba, the rest by torch."""

import importlib
from dataclasses import replace

import torch

from k3core.kernels.errors import BackendUnavailableError
from k3core.kernels.interface import Kernels


def build(base: Kernels) -> Kernels:
    """Replace KDA's prefill and decode.

    Raises:
        BackendUnavailableError: numba is not installed or does not work here.
    """
    try:
        # Imported only when this backend is wanted: numba takes a second to load.
        numba_ops = importlib.import_module("k3core.kernels.kda.numba_ops")
    except ImportError as error:
        raise BackendUnavailableError(f"numba: {error}") from error
    kda = numba_ops.NumbaKda(torch.get_num_threads())
    return replace(
        base,
        name="cpu-numba",
        reason="no compiled library; KDA by numba, the rest by torch",
        kda_prefill=kda.run,
        kda_decode=kda.run,
    )
