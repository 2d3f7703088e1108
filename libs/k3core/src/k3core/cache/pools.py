"""The arena: the only place where the cache touches tensors.

One uint8 tensor of equal, contiguous pages, and strided views of it for the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from k3core.batch import CacheViews
from k3core.cache import int8_codec
from k3core.cache.layout import PageLayout, int8_layer_bytes, round_up


class PageArena:
    """Owns the bytes of all pages of one worker.

    Args:
        layout: geometry of a page.
        num_pages: P.
        row_dtype: of MLA rows; its size must be the layout's.
        conv_dtype: of convolution windows.
        device: where the arena lives.
    """

    def __init__(
        self,
        layout: PageLayout,
        num_pages: int,
        row_dtype: torch.dtype,
        conv_dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.row_dtype = row_dtype
        self.conv_dtype = conv_dtype
        self.bytes = torch.zeros(num_pages, layout.page_bytes, dtype=torch.uint8, device=device)
        self.views = self._views()

    def copy_pages(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy whole pages; all sources are read before any destination is written."""
        device = self.bytes.device
        self.bytes[torch.tensor(list(dst), device=device)] = self.bytes[
            torch.tensor(list(src), device=device)
        ]

    def page(self, index: int) -> torch.Tensor:
        """One page's bytes: [page_bytes], uint8, a view."""
        return self.bytes[index]

    def clear_pages(self, pages: Sequence[int]) -> None:
        """Zero whole pages."""
        self.bytes[torch.tensor(list(pages), device=self.bytes.device)] = 0

    def encode_state(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Write the INT8 form of the raw state in `src` (G pages) into `dst` (int8_groups pages).

        The recurrent part is rounded to int8 with one scale a head and key channel, the
        convolution window is copied exactly; the source is not changed.
        """
        for layer, group in enumerate(self.layout.group_of_layer):
            packed = self._packed(layer, self._pages(dst))
            state_HVK = self.views.recurrent[layer][src[group]]
            values, scales = int8_codec.encode(state_HVK)
            packed.values.copy_(values)
            packed.scales.copy_(scales)
            packed.conv.copy_(self.views.conv[layer][src[group]])

    def decode_state(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Write the raw state of the INT8 form in `src` (int8_groups pages) into `dst` (G pages)."""
        self._decode(self._pages(src), dst)

    def decode_kept_state(self, kept: torch.Tensor, dst: Sequence[int]) -> None:
        """The same of an INT8 form that left the arena.

        Args:
            kept: its pages, [int8_groups, page_bytes], uint8, on the arena's device.
            dst: G pages, written.
        """
        self._decode(list(kept), dst)

    def _pages(self, pages: Sequence[int]) -> list[torch.Tensor]:
        return [self.bytes[page] for page in pages]

    def _decode(self, src: Sequence[torch.Tensor], dst: Sequence[int]) -> None:
        for layer, group in enumerate(self.layout.group_of_layer):
            packed = self._packed(layer, src)
            state_HVK = self.views.recurrent[layer][dst[group]]
            state_HVK.copy_(int8_codec.decode(packed.values, packed.scales))
            self.views.conv[layer][dst[group]].copy_(packed.conv)

    def _packed(self, layer: int, pages: Sequence[torch.Tensor]) -> "_PackedLayer":
        """Views of one layer's INT8 form inside its page."""
        sizes, per_page = self.layout.sizes, self.layout.int8_layers_per_page
        heads, width = sizes.state_heads, sizes.head_dim
        start = (layer % per_page) * int8_layer_bytes(sizes)
        page = pages[layer // per_page]
        values_end = heads * width * width
        scales_start = start + round_up(values_end)
        conv_start = scales_start + round_up(heads * width * 4)
        return _PackedLayer(
            values=page[start : start + values_end].view(torch.int8).view(heads, width, width),
            scales=page[scales_start : scales_start + heads * width * 4]
            .view(torch.float32)
            .view(heads, width),
            conv=page[conv_start : conv_start + sizes.conv_bytes]
            .view(self.conv_dtype)
            .view(sizes.conv_width - 1, 3 * heads * width),
        )

    def _views(self) -> CacheViews:
        layout, sizes = self.layout, self.layout.sizes
        rows = layout.unit_tokens
        layer_bytes = rows * sizes.row_bytes
        latent = tuple(
            self._strided(
                self.row_dtype,
                layer * layer_bytes,
                (layout.page_units, rows, sizes.row_elements),
                (layout.unit_bytes, sizes.row_bytes, self.row_dtype.itemsize),
            )
            for layer in range(sizes.mla_layers)
        )
        heads, width = sizes.state_heads, sizes.head_dim
        recurrent_stride = round_up(sizes.recurrent_bytes)
        conv_start = layout.group_layers * recurrent_stride
        recurrent: list[torch.Tensor] = []
        conv: list[torch.Tensor] = []
        for layer in range(sizes.kda_layers):
            place = layer % layout.group_layers
            recurrent.append(
                self._strided(
                    torch.float32,
                    place * recurrent_stride,
                    (heads, width, width),
                    (width * width * 4, width * 4, 4),
                )
            )
            channels = 3 * heads * width
            conv.append(
                self._strided(
                    self.conv_dtype,
                    conv_start + place * round_up(sizes.conv_bytes),
                    (sizes.conv_width - 1, channels),
                    (channels * self.conv_dtype.itemsize, self.conv_dtype.itemsize),
                )
            )
        return CacheViews(
            unit_tokens=rows,
            page_units=layout.page_units,
            latent=latent,
            recurrent=tuple(recurrent),
            conv=tuple(conv),
            group_of_layer=layout.group_of_layer,
        )

    def _strided(
        self, dtype: torch.dtype, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> torch.Tensor:
        """View [P, *shape] of one part of every page; offsets and strides in bytes."""
        size = dtype.itemsize
        typed = self.bytes.view(-1).view(dtype)
        return typed.as_strided(
            (self.num_pages, *shape),
            (self.layout.page_bytes // size, *(stride // size for stride in strides)),
            offset // size,
        )


@dataclass(frozen=True, slots=True)
class _PackedLayer:
    values: torch.Tensor
    scales: torch.Tensor
    conv: torch.Tensor
