"""Models of many shapes: the paged, chunked pass agrees with the plain dense one in each."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.random_model import base, layers, write_model

from k3core.config import TextConfig
from k3core.engine.single_sequence import Segment, SingleSequence
from k3core.kernels.registry import reference_kernels, select_kernels
from k3core.model.plans import MlaForm
from k3core.weights.loading import LoadOptions, load_text_model

LENGTH = 41


def shapes() -> dict[str, TextConfig]:
    kda, mla, moe = base().kda, base().mla, base().moe
    assert kda is not None
    assert mla is not None
    assert moe is not None
    short = layers("KMKM")
    return {
        "KDA only": layers("KKK"),
        "MLA only": layers("MMM"),
        "MLA first, all mixtures": layers("MKKM", dense=0),
        "all dense": layers("KM", dense=2),
        "one layer a block": replace(short, attn_res_block_size=1),
        "one block": replace(short, attn_res_block_size=99),
        "no depth mixing": replace(short, attn_res_block_size=None),
        "odd heads, wide convolution": replace(
            short, kda=replace(kda, num_heads=3, head_dim=20, conv_width=6)
        ),
        "one head, many channels": replace(short, kda=replace(kda, num_heads=1, head_dim=72)),
        "narrow convolution": replace(short, kda=replace(kda, conv_width=2)),
        "more heads than channels": replace(short, kda=replace(kda, num_heads=9, head_dim=4)),
        "another bound": replace(short, kda=replace(kda, gate_lower_bound=-2.5)),
        "no bound, low-rank gate": replace(
            short, kda=replace(kda, gate_lower_bound=None, has_full_rank_gate=False)
        ),
        "other MLA widths": replace(
            short,
            mla=replace(
                mla,
                num_heads=5,
                q_lora_rank=None,
                kv_lora_rank=28,
                nope_dim=12,
                rope_dim=6,
                value_dim=20,
                has_output_gate=False,
            ),
        ),
        "no shared key part": replace(short, mla=replace(mla, rope_dim=0)),
        "plain experts at model width": replace(
            short, moe=replace(moe, latent_size=None, has_latent_norm=False, mxfp4_group=None)
        ),
        "packed experts, no shared one": replace(
            short,
            moe=replace(
                moe,
                num_experts=6,
                experts_per_token=1,
                renormalize=False,
                num_shared_experts=0,
                intermediate_size=96,
                latent_size=64,
                scaling_factor=2.5,
            ),
        ),
        "expert groups": replace(short, moe=replace(moe, num_groups=4, groups_per_token=2)),
        "silu, tied head, odd vocabulary": replace(
            short, activation="silu", is_head_tied=True, vocab_size=101
        ),
        "situ without a linear bound": replace(short, situ_beta=2.0, situ_linear_beta=None),
    }


@pytest.mark.parametrize("name", list(shapes()))
def test_paged_chunks_agree_with_the_dense_pass(name: str, tmp_path: Path) -> None:
    config = write_model(tmp_path, shapes()[name])
    assert config.text == shapes()[name]
    device = torch.device("cpu")
    ids = torch.arange(LENGTH) * 37 % config.text.vocab_size
    options = LoadOptions(device, torch.float32)
    plain = load_text_model(tmp_path, config, reference_kernels(), options)
    forms: tuple[MlaForm, ...] = ("auto", "expanded", "absorbed")
    with torch.no_grad():
        wanted = plain.forward_dense(ids.unsqueeze(0))[0]
        for form in forms:
            options = LoadOptions(device, torch.float32, form)
            model = load_text_model(tmp_path, config, select_kernels(device), options)
            sequence = SingleSequence(model, LENGTH, torch.float32)
            cuts = (0, 13, 14, 15, 38, LENGTH)
            pieces = [
                sequence.feed(Segment(ids[low:high])).logits
                for low, high in itertools.pairwise(cuts)
            ]
            gap = (torch.cat(pieces) - wanted).abs().max() / wanted.abs().max()
            assert gap <= 2e-5, form
