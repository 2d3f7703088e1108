"""The mixture over depth against its equation, source by source."""

import math

import torch

from k3core.kernels.attn_res.reference import mix, mix_norm
from k3core.kernels.norm.reference import gated_rms_norm, rms_norm


def test_mixture_follows_its_equation() -> None:
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(4, 6, generator=generator).double() for _ in range(4)]
    query = torch.randn(6, generator=generator).double()
    found = mix(sources[-1], sources[:-1], query, 1e-5)
    for token in range(4):
        scores = []
        for source in sources:
            row = source[token].tolist()
            root = math.sqrt(sum(x * x for x in row) / 6 + 1e-5)
            scores.append(sum(x / root * w for x, w in zip(row, query.tolist(), strict=True)))
        shares = [math.exp(score) for score in scores]
        wanted = sum(
            share / sum(shares) * source[token]
            for share, source in zip(shares, sources, strict=True)
        )
        assert torch.allclose(found[token], wanted, atol=1e-12)


def test_without_snapshots_the_stream_passes_unchanged() -> None:
    x = torch.randn(3, 4)
    assert torch.equal(mix(x, [], torch.ones(4), 1e-5), x)


def test_fused_form_is_the_mixture_then_the_norm() -> None:
    x, snapshot, query, weight = (
        torch.randn(3, 4),
        torch.randn(3, 4),
        torch.randn(4),
        torch.randn(4),
    )
    wanted = rms_norm(mix(x, [snapshot], query, 1e-5), weight, 1e-6)
    assert torch.equal(mix_norm(x, [snapshot], query, 1e-5, weight, 1e-6), wanted)


def test_norm_casts_before_it_weighs() -> None:
    x = torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16)
    weight = torch.tensor([1.0078125, 1.0], dtype=torch.bfloat16)
    unit = (x.float() / math.sqrt(12.5)).bfloat16()
    assert torch.equal(rms_norm(x, weight, 0.0), weight * unit)
    assert rms_norm(x, weight.float(), 0.0).dtype == torch.bfloat16


def test_gated_norm_weighs_before_it_gates() -> None:
    o = torch.tensor([[[3.0, 4.0]]])
    gate = torch.tensor([[[0.0, 100.0]]])
    found = gated_rms_norm(o, torch.tensor([2.0, 3.0]), gate, 0.0)
    root = math.sqrt(12.5)
    assert torch.allclose(found, torch.tensor([[[3 / root, 12 / root]]]))
