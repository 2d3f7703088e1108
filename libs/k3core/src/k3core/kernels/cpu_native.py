"""The compiled backend for processors: C sources built on first use.

Enters the reference operators; leaves them with the fast ones in their place. Results of a
row do not depend on the batch around it, on how a sequence is cut into chunks, or on the
number of threads, bit for bit. Float32 and bfloat16; only `kda_dense` has gradients
(`training.py` has a whole that does).
"""

from dataclasses import replace
from functools import lru_cache

import torch

from k3core.kernels.attn_res.native import NativeAttnRes
from k3core.kernels.interface import Kernels
from k3core.kernels.kda.autograd import NativeKdaDense
from k3core.kernels.kda.native import NativeKda
from k3core.kernels.linear.native import NativeLinear
from k3core.kernels.mla.native import NativeMla
from k3core.kernels.moe.native import NativeMoe
from k3core.kernels.native.build import (
    build_library,
    cache_dirs,
    find_toolchain,
    usable_cache_dir,
)
from k3core.kernels.native.compiled import NativeLibrary, load_library
from k3core.kernels.norm.native import NativeNorm
from k3core.kernels.situ.native import NativeActivation


@lru_cache(maxsize=1)
def native_library() -> NativeLibrary:
    """The library of this process, compiled if this machine has not done so before.

    Raises:
        BackendUnavailableError: no compiler, or it cannot compile or load the sources.
    """
    return load_library(build_library(usable_cache_dir(cache_dirs()), find_toolchain()))


def build(base: Kernels) -> Kernels:
    """Replace what the native library does better.

    Raises:
        BackendUnavailableError: no compiler, or it cannot compile or load the sources.
    """
    library = native_library()
    library.set_threads(torch.get_num_threads())
    kda, mla, moe = NativeKda(library), NativeMla(library), NativeMoe(library)
    linear = NativeLinear(library)
    norm, attn_res = NativeNorm(library), NativeAttnRes(library)
    return replace(
        base,
        name="cpu-native",
        reason=f"compiled {library.path.name}, {library.get_threads()} threads",
        linear=linear.run,
        prepare_weight=linear.prepare,
        rms_norm=norm.rms_norm,
        gated_rms_norm=norm.gated_rms_norm,
        activate=NativeActivation(library).run,
        attn_res_mix=attn_res.mix,
        attn_res_norm=attn_res.mix_norm,
        kda_prefill=kda.run,
        kda_decode=kda.run,
        kda_dense=NativeKdaDense(library).run,
        mla_write=mla.write,
        mla_prefill=mla.prefill,
        mla_decode=mla.decode,
        route=moe.route,
        experts=moe.experts,
    )
