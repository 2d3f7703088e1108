"""What the compiled kernels read must live until they return."""

import weakref
from pathlib import Path

import torch
from support.kda_cases import make_case, make_plan

from k3core.kernels.interface import MlaPlan, MlaWeights
from k3core.kernels.kda.native import NativeKda
from k3core.kernels.mla.native import NativeMla
from k3core.kernels.native.compiled import NativeLibrary, byte_array, long_array


class CacheSweep:
    """Stands for a kernel during which another thread's calls push all arrays out."""

    def __init__(self, longs: list[tuple[int, ...]], flags: list[tuple[bool, ...]]) -> None:
        self._longs = longs
        self._flags = flags
        self.num_alive = 0

    def __call__(self, address: int) -> int:
        arrays = [
            *(weakref.ref(long_array(values)) for values in self._longs),
            *(weakref.ref(byte_array(values)) for values in self._flags),
        ]
        long_array.cache_clear()
        byte_array.cache_clear()
        self.num_alive = sum(array() is not None for array in arrays)
        return 0


def _library(sweep: CacheSweep) -> NativeLibrary:
    names = ("k3_kda", "k3_mla_absorbed", "k3_mla_expanded", "k3_mla_write")
    return NativeLibrary(Path("none"), dict.fromkeys(names, sweep), lambda _: None, lambda: 1)


def test_arrays_of_a_recurrence_outlive_the_cache_they_came_from() -> None:
    inputs, weights, states = make_case(40, (2, 8, 8, 4), -5.0, seed=1)
    plan = make_plan([3, 37], [3, 7], [True, False], exports=((1, 20, 9),))
    sweep = CacheSweep([plan.starts, plan.pages, plan.exports[0]], [plan.has_state])
    NativeKda(_library(sweep)).run(inputs, weights, plan, states)
    assert sweep.num_alive == 4


def test_arrays_of_an_attention_outlive_the_cache_they_came_from() -> None:
    plan = MlaPlan((0, 1, 5), (7, 2), torch.zeros(2, 1, dtype=torch.int64))
    sweep = CacheSweep([plan.starts, plan.contexts], [])
    weights = MlaWeights(torch.zeros(2 * 16, 8), 8, 8, 0.3)
    latent, q = torch.zeros(1, 1, 8, 8), torch.zeros(5, 2, 8)
    NativeMla(_library(sweep)).decode(q, latent, weights, plan)
    assert sweep.num_alive == 2
