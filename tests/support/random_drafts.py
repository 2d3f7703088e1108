"""Small drafts with random weights, and random sequences for them."""

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn

from k3core.drafts.config import DraftAttention, DraftShape, DSparkConfig, EagleConfig, Taps, Yarn
from k3core.drafts.dspark import DSparkDraft, TargetTables
from k3core.drafts.eagle import EagleDraft

Draft = TypeVar("Draft", bound=nn.Module)

VOCAB = 53
WIDTH = 24


@dataclass(frozen=True, slots=True)
class Sequences:
    """Two random sequences [B, T] with taps [B, T, X] of a target that does not exist."""

    taps: torch.Tensor
    token_ids: torch.Tensor


def attention() -> DraftAttention:
    return DraftAttention(
        num_heads=3,
        q_lora_rank=14,
        kv_lora_rank=10,
        nope_dim=6,
        rope_dim=8,
        value_dim=5,
        rope_theta=50000.0,
    )


def with_yarn(config: DSparkConfig) -> DSparkConfig:
    yarn = Yarn(32.0, 4096, 32.0, 1.0, 1.0)
    shape = replace(config.shape, attention=replace(config.shape.attention, yarn=yarn))
    return replace(config, shape=shape)


def draft_shape(layers: tuple[int, ...], num_tokens: int) -> DraftShape:
    return DraftShape(
        hidden_size=WIDTH,
        intermediate_size=40,
        vocab_size=VOCAB,
        rms_norm_eps=1e-5,
        attention=attention(),
        taps=Taps(layers),
        num_tokens=num_tokens,
    )


def eagle_config(num_tokens: int = 4) -> EagleConfig:
    return EagleConfig(draft_shape((0, 2, 4), num_tokens))


def dspark_config(num_tokens: int = 5) -> DSparkConfig:
    return DSparkConfig(draft_shape((1, 3), num_tokens), 2, mask_token_id=50, markov_rank=7)


def random_eagle(config: EagleConfig | None = None) -> EagleDraft:
    return shaken(EagleDraft(config or eagle_config()))


def random_dspark(config: DSparkConfig | None = None) -> DSparkDraft:
    generator = torch.Generator().manual_seed(3)
    embed, head = (
        torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return shaken(DSparkDraft(config or dspark_config(), TargetTables(embed, head / WIDTH**0.5)))


def sequences(num_taps: int, length: int = 19) -> Sequences:
    generator = torch.Generator().manual_seed(5)
    return Sequences(
        torch.randn(2, length, num_taps * WIDTH, generator=generator, dtype=torch.float64),
        torch.randint(VOCAB, (2, length), generator=generator),
    )


def shaken(draft: Draft) -> Draft:
    """float64, every parameter random, norms and biases included."""
    generator = torch.Generator().manual_seed(7)
    draft = draft.double()
    with torch.no_grad():
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            is_norm = parameter.ndim == 1
            parameter.copy_(1 + 0.3 * noise if is_norm else noise / parameter.shape[-1] ** 0.5)
    return draft
