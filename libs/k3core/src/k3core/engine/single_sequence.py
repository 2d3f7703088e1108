"""One sequence through the model with a small cache of its own.

For verification, benchmarks and tests: the same paged forward pass that serving uses, without
scheduler, pools or policies. Units are laid out in order; each KDA layer has a page of its own.
"""

from dataclasses import dataclass

import torch

from k3core.batch import CacheViews, ForwardBatch, ForwardOutput
from k3core.config import TextConfig
from k3core.model.text import TextModel

UNIT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Segment:
    """A chunk to feed.

    Attributes:
        token_ids: [T], int64, the model's device.
        image_rows: [M], int64, rows of the chunk to replace, or None.
        image_embeds: [M, D], or None.
    """

    token_ids: torch.Tensor
    image_rows: torch.Tensor | None = None
    image_embeds: torch.Tensor | None = None


class SingleSequence:
    """Feeds one sequence chunk by chunk; owns its cache tensors."""

    def __init__(self, model: TextModel, max_tokens: int, dtype: torch.dtype) -> None:
        """Allocate a cache.

        Args:
            model: to run; its device is the cache's.
            max_tokens: tokens the sequence may reach.
            dtype: of latent rows and of convolution rows.
        """
        self._model = model
        device = model.embed.device
        num_units = -(-max_tokens // UNIT_TOKENS)
        self._max_tokens = max_tokens
        self._views = allocate_views(model.config, num_units, 1, dtype, device)
        self._table = torch.arange(num_units, dtype=torch.int32).unsqueeze(0)
        num_groups = len(set(self._views.group_of_layer))
        self._pages = torch.zeros(1, num_groups, dtype=torch.int32)
        self.num_tokens = 0

    def feed(
        self, segment: Segment, taps: tuple[str, ...] = (), *, all_logits: bool = True
    ) -> ForwardOutput:
        """Run the next chunk; logits of every row of it, or of its last row only."""
        length = len(segment.token_ids)
        assert self.num_tokens + length <= self._max_tokens, "the cache is full"
        batch = ForwardBatch(
            token_ids=segment.token_ids,
            query_starts=(0, length),
            context_lengths=(self.num_tokens,),
            unit_tables=self._table,
            state_pages=self._pages,
            logits_rows=tuple(range(0 if all_logits else length - 1, length)),
            image_rows=segment.image_rows,
            image_embeds=segment.image_embeds,
        )
        output = self._model(batch, self._views, taps)
        self.num_tokens += length
        return output


def allocate_views(
    config: TextConfig, num_units: int, num_states: int, dtype: torch.dtype, device: torch.device
) -> CacheViews:
    """Plain tensors in the form of `CacheViews`, one unit a page, one KDA layer a group.

    Args:
        config: sizes.
        num_units: units of MLA rows.
        num_states: state pages of each KDA layer.
        dtype: of latent and convolution rows; recurrent states are float32.
        device: of the tensors.
    """
    latent: list[torch.Tensor] = []
    recurrent: list[torch.Tensor] = []
    conv: list[torch.Tensor] = []
    for kind in config.attention:
        if kind == "mla":
            assert config.mla is not None, "an MLA layer has MLA's sizes"
            shape = (num_units, 1, UNIT_TOKENS, config.mla.row_dim)
            latent.append(torch.zeros(shape, dtype=dtype, device=device))
            continue
        kda = config.kda
        assert kda is not None, "a KDA layer has KDA's sizes"
        state = (num_states, kda.num_heads, kda.head_dim, kda.head_dim)
        recurrent.append(torch.zeros(state, device=device))
        rows = (num_states, kda.conv_width - 1, 3 * kda.width)
        conv.append(torch.zeros(rows, dtype=dtype, device=device))
    return CacheViews(
        unit_tokens=UNIT_TOKENS,
        page_units=1,
        latent=tuple(latent),
        recurrent=tuple(recurrent),
        conv=tuple(conv),
        group_of_layer=tuple(range(len(recurrent))),
    )
