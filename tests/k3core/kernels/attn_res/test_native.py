"""The mixture over depth against float64."""

import pytest
import torch

from k3core.kernels.attn_res import reference
from k3core.kernels.attn_res.native import NativeAttnRes
from k3core.kernels.cpu_native import native_library


@pytest.fixture(scope="module")
def attn_res() -> NativeAttnRes:
    return NativeAttnRes(native_library())


def _sources(count: int, num_tokens: int, width: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(num_tokens, width, generator=generator) * 3**i for i in range(count)]


@pytest.mark.parametrize("num_snapshots", [0, 1, 3, 8])
@pytest.mark.parametrize("width", [5, 64, 129])
def test_mix_and_its_norm_meet_float64(
    attn_res: NativeAttnRes, num_snapshots: int, width: int
) -> None:
    *snapshots, x = _sources(num_snapshots + 1, 13, width)
    query = torch.randn(width, generator=torch.Generator().manual_seed(9))
    weight = torch.randn(width, generator=torch.Generator().manual_seed(8))
    wide = [snapshot.double() for snapshot in snapshots]
    mixed = reference.mix(x.double(), wide, query.double(), 1e-5)
    normed = reference.mix_norm(x.double(), wide, query.double(), 1e-5, weight.double(), 1e-6)
    scale = mixed.abs().max()
    assert (attn_res.mix(x, snapshots, query, 1e-5) - mixed).abs().max() <= 4e-6 * scale
    out = attn_res.mix_norm(x, snapshots, query, 1e-5, weight, 1e-6)
    assert (out - normed).abs().max() <= 2e-5


def test_bfloat16_mixes_in_float32_and_norms_the_rounded_mixture(attn_res: NativeAttnRes) -> None:
    *snapshots, x = (source.bfloat16() for source in _sources(4, 13, 64))
    query, weight = torch.randn(64), torch.ones(64, dtype=torch.bfloat16)
    wide = [snapshot.float() for snapshot in snapshots]
    mixed = attn_res.mix(x, snapshots, query, 1e-5)
    assert torch.equal(mixed, attn_res.mix(x.float(), wide, query, 1e-5).bfloat16())
    fused = attn_res.mix_norm(x, snapshots, query, 1e-5, weight, 1e-5)
    assert torch.equal(fused, attn_res.mix_norm(mixed, (), query, 1e-5, weight, 1e-5))


def test_rows_ignore_their_batch(attn_res: NativeAttnRes) -> None:
    *snapshots, x = _sources(4, 300, 40)
    query, weight = torch.randn(40), torch.ones(40)
    together = attn_res.mix_norm(x, snapshots, query, 1e-5, weight, 1e-5)
    rows = slice(77, 79)
    some = [snapshot[rows] for snapshot in snapshots]
    alone = attn_res.mix_norm(x[rows], some, query, 1e-5, weight, 1e-5)
    assert torch.equal(alone, together[rows])


def test_a_block_may_be_one_layer_of_many(attn_res: NativeAttnRes) -> None:
    *snapshots, x = torch.randn(100, 3, 24, generator=torch.Generator().manual_seed(2))
    query = torch.randn(24, generator=torch.Generator().manual_seed(9))
    truth = reference.mix(x.double(), [s.double() for s in snapshots], query.double(), 1e-5)
    assert (attn_res.mix(x, snapshots, query, 1e-5) - truth).abs().max() <= 4e-6
