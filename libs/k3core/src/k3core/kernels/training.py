"""The operators for training on a processor: every one of them differentiable."""

import logging
from dataclasses import replace

from k3core.kernels.cpu_native import native_library
from k3core.kernels.errors import BackendUnavailableError
from k3core.kernels.interface import Kernels
from k3core.kernels.kda.autograd import NativeKdaDense
from k3core.kernels.mla.dense import fused_dense
from k3core.kernels.registry import reference_kernels

logger = logging.getLogger(__name__)


def training_kernels() -> Kernels:
    """Torch's operators, attention fused, KDA's loop over tokens compiled in both directions.

    Without a compiler the loop stays torch's too, with a warning: right, and far slower.
    """
    base = replace(reference_kernels(), mla_dense=fused_dense)
    try:
        library = native_library()
    except BackendUnavailableError as error:
        logger.warning(
            "kernel backend unavailable", extra={"backend": "cpu-train", "why": str(error)}
        )
        return base
    return replace(
        base,
        name="cpu-train",
        reason=f"KDA compiled ({library.path.name}), the rest by torch",
        kda_dense=NativeKdaDense(library).run,
    )
