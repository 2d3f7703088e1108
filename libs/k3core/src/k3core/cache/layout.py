"""How one page is laid out: pure arithmetic from a model's sizes to bytes and descriptors.

A page is one contiguous span. It holds either `page_units` units of MLA rows, unit after
unit, each unit holding U rows of every MLA layer, layer after layer; or the states of one
group of KDA layers, recurrent parts first, then convolution windows. A unit is contiguous
too, so a hand-off is a list of spans and the transport knows nothing of what they hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from k3core.cache.spec import CacheError
from k3core.config import TextConfig

LAYOUT_VERSION = 1
# Every part starts on this many bytes, so that any dtype can be viewed in place and a
# descriptor meets the alignment that RDMA registration likes best.
ALIGN_BYTES = 256


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What a layout must know of a model, at one tensor-parallel rank.

    Attributes:
        mla_layers: layers that keep rows.
        row_elements: C + R, elements of a row; not divided by tensor parallelism.
        row_bytes: bytes of a row.
        kda_layers: layers that keep a state.
        state_heads: H of this rank.
        head_dim: K = V.
        conv_width: W; W - 1 inputs are kept.
        conv_itemsize: bytes of one convolution input.
    """

    mla_layers: int
    row_elements: int
    row_bytes: int
    kda_layers: int
    state_heads: int
    head_dim: int
    conv_width: int
    conv_itemsize: int

    @property
    def recurrent_bytes(self) -> int:
        """Bytes of one layer's recurrent state, float32."""
        return self.state_heads * self.head_dim * self.head_dim * 4

    @property
    def conv_bytes(self) -> int:
        """Bytes of one layer's convolution window."""
        return (self.conv_width - 1) * 3 * self.state_heads * self.head_dim * self.conv_itemsize


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The geometry of every page of one arena. Two ends that exchange pages compare it.

    Attributes:
        unit_tokens: U.
        page_units: units a page holds.
        num_groups: G, pages of one raw state.
        group_layers: KDA layers in a full group; the last group may hold fewer.
        page_bytes: bytes of a page.
        unit_bytes: bytes of a unit.
        int8_groups: pages of one INT8 state.
        sizes: the model sizes it was made from.
    """

    unit_tokens: int
    page_units: int
    num_groups: int
    group_layers: int
    page_bytes: int
    unit_bytes: int
    int8_groups: int
    sizes: ModelSizes
    version: int = LAYOUT_VERSION

    @property
    def int8_layers_per_page(self) -> int:
        """KDA layers whose INT8 form fits a page; a layer never straddles two."""
        return max(1, self.page_bytes // max(1, int8_layer_bytes(self.sizes)))

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """KDA group of each KDA layer."""
        return tuple(i // self.group_layers for i in range(self.sizes.kda_layers))


@dataclass(frozen=True, slots=True)
class Span:
    """One contiguous move between two arenas, in bytes from each arena's start."""

    src: int
    dst: int
    length: int


def model_sizes(
    config: TextConfig, tp: int = 1, row_itemsize: int = 2, conv_itemsize: int = 2
) -> ModelSizes:
    """Sizes of one rank's cache.

    Raises:
        CacheError: if heads do not divide among the ranks.
    """
    kda, mla = config.kda, config.mla
    heads = kda.num_heads if kda else 0
    if heads % tp:
        raise CacheError(f"{heads} KDA heads do not divide among {tp} ranks")
    row = mla.row_dim if mla else 0
    return ModelSizes(
        mla_layers=len(config.mla_layers),
        row_elements=row,
        row_bytes=row * row_itemsize,
        kda_layers=len(config.kda_layers),
        state_heads=heads // tp,
        head_dim=kda.head_dim if kda else 0,
        conv_width=kda.conv_width if kda else 1,
        conv_itemsize=conv_itemsize,
    )


def plan_layout(
    sizes: ModelSizes, unit_tokens: int = 128, num_groups: int = 0, page_units: int = 0
) -> PageLayout:
    """Choose groups and units a page so that both kinds fill a page well.

    Args:
        sizes: of one rank.
        unit_tokens: U.
        num_groups: G, or 0 to choose: a group then has about as many KDA layers as there are
            MLA layers, which makes a page a slab a layer whatever it holds.
        page_units: units a page, or 0: the fewest whose rows take as much as a state group.

    Raises:
        CacheError: if a model has neither kind of layer.
    """
    if not sizes.mla_layers and not sizes.kda_layers:
        raise CacheError("a model with neither MLA nor KDA layers has nothing to cache")
    unit = round_up(unit_tokens * sizes.mla_layers * sizes.row_bytes)
    if not num_groups:
        num_groups = max(1, -(-sizes.kda_layers // max(1, sizes.mla_layers)))
    return _layout(sizes, unit_tokens, unit, num_groups, page_units)


def spans(
    layout: PageLayout,
    src_units: Sequence[int],
    dst_units: Sequence[int],
    src_pages: Sequence[int] = (),
    dst_pages: Sequence[int] = (),
) -> list[Span]:
    """Byte moves that carry units and state pages from one arena to another.

    Neighbouring units on both sides join into one span, so that an undivided page is one.

    Raises:
        CacheError: if the two sides differ in length.
    """
    if len(src_units) != len(dst_units) or len(src_pages) != len(dst_pages):
        raise CacheError(
            f"cannot pair {len(src_units)} units, {len(src_pages)} pages with "
            f"{len(dst_units)} units, {len(dst_pages)} pages"
        )
    moves = [
        Span(unit_offset(layout, src), unit_offset(layout, dst), layout.unit_bytes)
        for src, dst in zip(src_units, dst_units, strict=True)
    ]
    moves += [
        Span(src * layout.page_bytes, dst * layout.page_bytes, layout.page_bytes)
        for src, dst in zip(src_pages, dst_pages, strict=True)
    ]
    joined: list[Span] = []
    for move in moves:
        if joined:
            last = joined[-1]
            if (last.src + last.length, last.dst + last.length) == (move.src, move.dst):
                joined[-1] = Span(last.src, last.dst, last.length + move.length)
                continue
        joined.append(move)
    return joined


def unit_offset(layout: PageLayout, unit: int) -> int:
    """Where a unit starts, in bytes from the arena's start."""
    page, place = divmod(unit, layout.page_units)
    return page * layout.page_bytes + place * layout.unit_bytes


def int8_layer_bytes(sizes: ModelSizes) -> int:
    """Bytes of one layer's INT8 form: values, a scale a head and key channel, exact window."""
    values = sizes.state_heads * sizes.head_dim * sizes.head_dim
    scales = sizes.state_heads * sizes.head_dim * 4
    return round_up(values) + round_up(scales) + round_up(sizes.conv_bytes)


def int8_state_bytes(sizes: ModelSizes) -> int:
    """Bytes of one whole INT8 checkpoint."""
    return sizes.kda_layers * int8_layer_bytes(sizes)


def raw_state_bytes(sizes: ModelSizes) -> int:
    """Bytes of one whole raw state, padding between parts included."""
    return sizes.kda_layers * (round_up(sizes.recurrent_bytes) + round_up(sizes.conv_bytes))


def _layout(
    sizes: ModelSizes, unit_tokens: int, unit: int, groups: int, page_units: int
) -> PageLayout:
    group_layers = -(-sizes.kda_layers // groups) if sizes.kda_layers else 1
    layer = round_up(sizes.recurrent_bytes) + round_up(sizes.conv_bytes)
    state_page = group_layers * layer if sizes.kda_layers else 0
    if not page_units:
        page_units = max(1, -(-state_page // unit)) if unit and state_page else 1
    page = max(state_page, page_units * unit)
    per_page = max(1, page // max(1, int8_layer_bytes(sizes)))
    int8_groups = -(-sizes.kda_layers // per_page)
    used_groups = -(-sizes.kda_layers // group_layers) if sizes.kda_layers else 0
    return PageLayout(
        unit_tokens, page_units, used_groups, group_layers, page, unit, int8_groups, sizes
    )


def round_up(size: int) -> int:
    """A size with the padding that keeps the next part aligned."""
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES
