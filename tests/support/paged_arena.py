"""A page arena as awkward as a real one, for tests of the model: every view is strided."""

from dataclasses import dataclass

import torch

from k3core.batch import CacheViews
from k3core.config import TextConfig


@dataclass(frozen=True)
class ArenaShape:
    """Sizes of a test arena."""

    num_pages: int
    unit_tokens: int
    page_units: int
    num_groups: int


def build_views(config: TextConfig, shape: ArenaShape, fill: float = 7.0) -> CacheViews:
    """Cut views out of one float32 arena [P, page], filled with rubbish to catch stale reads."""
    kda, mla = config.kda, config.mla
    num_kda, num_mla = len(config.kda_layers), len(config.mla_layers)
    latent_size = shape.page_units * shape.unit_tokens * mla.row_dim if mla else 0
    state_size = kda.num_heads * kda.head_dim**2 if kda else 0
    conv_size = (kda.conv_width - 1) * 3 * kda.width if kda else 0
    group_of_layer = tuple(i % shape.num_groups for i in range(num_kda))
    in_group = [group_of_layer[:i].count(group_of_layer[i]) for i in range(num_kda)]
    largest_group = max(in_group, default=-1) + 1
    # An odd tail keeps the page stride from being a multiple of anything.
    page_size = max(num_mla * latent_size, largest_group * (state_size + conv_size)) + 5
    arena = torch.full((shape.num_pages, page_size), fill)

    def cut(offset: int, *dims: int) -> torch.Tensor:
        size = int(torch.tensor(dims).prod())
        return arena[:, offset : offset + size].unflatten(1, dims)

    return CacheViews(
        unit_tokens=shape.unit_tokens,
        page_units=shape.page_units,
        latent=tuple(
            cut(i * latent_size, shape.page_units, shape.unit_tokens, mla.row_dim)
            for i in range(num_mla)
        ),
        recurrent=tuple(
            cut(place * (state_size + conv_size), kda.num_heads, kda.head_dim, kda.head_dim)
            for place in in_group
        ),
        conv=tuple(
            cut(place * (state_size + conv_size) + state_size, kda.conv_width - 1, 3 * kda.width)
            for place in in_group
        ),
        group_of_layer=group_of_layer,
    )
