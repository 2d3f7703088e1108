"""The same sources for the plainest processor: no AVX, no fused multiply-add, no threads."""

from pathlib import Path

import pytest
import torch
from support.kda_cases import assert_close, copy_states, make_case, make_plan, to_double

from k3core.kernels.interface import Activation, ExpertWeights, MlaPlan, MlaWeights
from k3core.kernels.kda import reference as kda_reference
from k3core.kernels.kda.native import NativeKda
from k3core.kernels.linear.native import NativeLinear
from k3core.kernels.mla import reference as mla_reference
from k3core.kernels.mla.native import NativeMla
from k3core.kernels.moe import reference as moe_reference
from k3core.kernels.moe.native import NativeMoe
from k3core.kernels.native.build import build_library, find_toolchain
from k3core.kernels.native.compiled import NativeLibrary, load_library


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> NativeLibrary:
    folder: Path = tmp_path_factory.mktemp("plain")
    return load_library(build_library(folder, find_toolchain(), [()]))


def _draw(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bound", [-5.0, None])
def test_kda_meets_the_float64_loop(plain: NativeLibrary, bound: float | None) -> None:
    inputs, weights, states = make_case(40, (3, 16, 24, 4), bound, seed=1)
    plan = make_plan([1, 2, 37], [3, 7, 5], [True, False, True], exports=((2, 20, 9),))
    truth_states, actual_states = copy_states(states, torch.float64), copy_states(states)
    truth = kda_reference.prefill(*to_double(inputs, weights), plan, truth_states)
    assert_close(NativeKda(plain).run(inputs, weights, plan, actual_states), truth)
    assert_close(actual_states.recurrent, truth_states.recurrent)


def test_products_meet_float64(plain: NativeLibrary) -> None:
    x, weight = _draw(1, 7, 75), _draw(2, 21, 75)
    truth = x.double() @ weight.double().T
    assert (NativeLinear(plain).run(x, weight) - truth).abs().max() <= 1e-5


def test_packed_experts_meet_float64(plain: NativeLibrary) -> None:
    generator = torch.Generator().manual_seed(3)
    w13 = torch.randint(0, 256, (3, 128, 16), generator=generator, dtype=torch.uint8)
    w2 = torch.randint(0, 256, (3, 32, 32), generator=generator, dtype=torch.uint8)
    scales = torch.full((3, 128, 1), 122).byte(), torch.full((3, 32, 2), 121).byte()
    weights = ExpertWeights(w13, scales[0], w2, scales[1], 32)
    x, ids, shares = _draw(4, 5, 32), _draw(5, 5, 3).topk(2).indices, torch.ones(5, 2)
    situ = Activation(4.0, 25.0)
    truth = moe_reference.experts(x.double(), ids, shares.double(), weights, situ)
    out = NativeMoe(plain).experts(x, ids, shares, weights, situ)
    assert (out - truth).abs().max() <= 3e-6 * truth.abs().max()


def test_attention_meets_float64(plain: NativeLibrary) -> None:
    latent, q = _draw(6, 4, 2, 16, 40), _draw(7, 30, 3, 24)
    weights = MlaWeights(_draw(8, 3 * 28, 32) * 0.3, 16, 12, 24**-0.5)
    plan = MlaPlan((0, 1, 30), (70, 5), torch.tensor([[6, 1, 4, 0, 2], [7, 5, 3, 0, 0]]))
    wide = MlaWeights(weights.kv_b.double(), 16, 12, 24**-0.5)
    truth = mla_reference.prefill(q.double(), latent.double(), wide, plan)
    for form in (NativeMla(plain).prefill, NativeMla(plain).decode):
        assert (form(q, latent, weights, plan) - truth).abs().max() <= 5e-6 * truth.abs().max()
