"""Choosing the operators' backend, once, at start.

Enters a device and a wish; leaves one `Kernels`, logged with the reason. A backend is a
module of this room with `build(base: Kernels) -> Kernels`: it returns `base` with the fields
it does better replaced (`dataclasses.replace`) and with its own name and reason, or raises
`BackendUnavailableError` saying what is missing (no compiler, no driver, ...). To plug one in,
import its `build` here and add a row to `BACKENDS`; rows are tried in order of preference.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from k3core.kernels import cpu_native, cpu_numba, cuda_triton
from k3core.kernels.attn_res import reference as attn_res
from k3core.kernels.errors import BackendUnavailableError
from k3core.kernels.interface import Kernels
from k3core.kernels.kda import reference as kda
from k3core.kernels.mla import reference as mla
from k3core.kernels.moe import reference as moe
from k3core.kernels.norm import reference as norm
from k3core.kernels.situ import reference as situ

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to run the operators on one kind of device."""

    name: str
    device_type: str
    build: Callable[[Kernels], Kernels]


BACKENDS: tuple[Backend, ...] = (
    Backend("cpu-native", "cpu", cpu_native.build),
    Backend("cpu-numba", "cpu", cpu_numba.build),
    Backend("cuda-triton", "cuda", cuda_triton.build),
)


def reference_kernels() -> Kernels:
    """The truth: plain torch on any device and in any dtype, float64 included."""
    return Kernels(
        name="reference",
        reason="asked for",
        checkpoint_alignment=1,
        linear=torch.nn.functional.linear,
        prepare_weight=_leave,
        rms_norm=norm.rms_norm,
        gated_rms_norm=norm.gated_rms_norm,
        activate=situ.activate,
        attn_res_mix=attn_res.mix,
        attn_res_norm=attn_res.mix_norm,
        kda_prefill=kda.prefill,
        kda_decode=kda.decode,
        kda_dense=kda.dense,
        mla_dense=mla.dense,
        mla_write=mla.write,
        mla_prefill=mla.prefill,
        mla_decode=mla.decode,
        route=moe.route,
        experts=moe.experts,
    )


def select_kernels(device: torch.device, prefer: str = "auto") -> Kernels:
    """Choose the operators for a device; call once, at start.

    Args:
        device: where the model runs.
        prefer: `auto` takes the first backend for the device that can be built, warns about
            each that cannot, and ends at the reference; `reference` or a backend's name takes
            that one or fails.

    Raises:
        BackendUnavailableError: the named backend is unknown, for another device, or incomplete.
    """
    base = reference_kernels()
    if prefer == "reference":
        return _log(base)
    candidates = [b for b in BACKENDS if b.device_type == device.type]
    if prefer != "auto":
        named = next((b for b in candidates if b.name == prefer), None)
        if named is None:
            raise BackendUnavailableError(f"no kernel backend {prefer!r} for {device.type}")
        return _log(named.build(base))
    for backend in candidates:
        try:
            return _log(backend.build(base))
        except BackendUnavailableError as error:
            logger.warning(
                "kernel backend unavailable", extra={"backend": backend.name, "why": str(error)}
            )
    return _log(replace(base, reason=f"no faster backend for {device.type}"))


def _leave(weight: torch.Tensor) -> None:
    """Nothing is kept: torch multiplies with weights as they are stored."""


def _log(kernels: Kernels) -> Kernels:
    logger.info("kernels chosen", extra={"backend": kernels.name, "reason": kernels.reason})
    return kernels
