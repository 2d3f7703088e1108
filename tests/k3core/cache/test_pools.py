"""One arena, two kinds of pages: views do not overlap, copies are exact, INT8 is bounded."""

from itertools import pairwise

import pytest
import torch

from k3core.cache.layout import (
    ModelSizes,
    Span,
    int8_state_bytes,
    plan_layout,
    raw_state_bytes,
    spans,
)
from k3core.cache.pools import PageArena
from k3core.cache.spec import CacheError

_SMALL = ModelSizes(
    mla_layers=2,
    row_elements=40,
    row_bytes=80,
    kda_layers=5,
    state_heads=2,
    head_dim=16,
    conv_width=4,
    conv_itemsize=2,
)
_K3_TP8 = ModelSizes(24, 576, 576, 69, 12, 128, 4, 2)


def _arena(num_pages: int = 6) -> PageArena:
    return PageArena(plan_layout(_SMALL, 8), num_pages, torch.bfloat16, torch.bfloat16)


def _slots(arena: PageArena) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Pages of a raw state, of its INT8 form and of a second raw state."""
    groups, packed = arena.layout.num_groups, arena.layout.int8_groups
    ends = (0, groups, groups + packed, 2 * groups + packed)
    raw, small, back = (tuple(range(a, b)) for a, b in pairwise(ends))
    return raw, small, back


def _fill_state(arena: PageArena, pages: tuple[int, ...], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for layer, group in enumerate(arena.layout.group_of_layer):
        state = arena.views.recurrent[layer][pages[group]]
        state.copy_(torch.randn(state.shape, generator=generator))
        conv = arena.views.conv[layer][pages[group]]
        conv.copy_(torch.randn(conv.shape, generator=generator))


def test_the_published_sizes_give_three_groups_and_near_a_recipe_page() -> None:
    layout = plan_layout(_K3_TP8)
    assert (layout.num_groups, layout.group_layers, layout.page_units) == (3, 23, 11)
    assert layout.int8_groups == 1
    assert layout.group_of_layer == (0,) * 23 + (1,) * 23 + (2,) * 23


def test_an_int8_checkpoint_is_at_most_three_tenths_of_a_raw_one() -> None:
    assert int8_state_bytes(_K3_TP8) <= 0.30 * raw_state_bytes(_K3_TP8)


def test_no_two_rows_of_a_page_share_a_byte() -> None:
    arena = _arena()
    for layer, view in enumerate(arena.views.latent):
        for unit in range(arena.layout.page_units):
            view[3, unit] = layer * 100 + unit
    for layer, view in enumerate(arena.views.latent):
        for unit in range(arena.layout.page_units):
            assert (view[3, unit] == layer * 100 + unit).all()
    assert not arena.bytes[[0, 1, 2, 4, 5]].any()


def test_no_two_parts_of_a_state_share_a_byte() -> None:
    arena = _arena()
    pages = tuple(range(1, 1 + arena.layout.num_groups))
    for layer, group in enumerate(arena.layout.group_of_layer):
        arena.views.recurrent[layer][pages[group]] = float(layer)
        arena.views.conv[layer][pages[group]] = float(-layer)
    for layer, group in enumerate(arena.layout.group_of_layer):
        assert (arena.views.recurrent[layer][pages[group]] == layer).all()
        assert (arena.views.conv[layer][pages[group]] == -layer).all()
    assert not arena.bytes[0].any()


def test_copied_pages_are_equal_and_sources_unchanged() -> None:
    arena = _arena()
    _fill_state(arena, (0, 1, 2), 1)
    before = arena.bytes.clone()
    arena.copy_pages((0, 1), (3, 4))
    assert torch.equal(arena.bytes[3:5], before[0:2])
    assert torch.equal(arena.bytes[:3], before[:3])


def test_pages_that_change_places_keep_their_bytes() -> None:
    arena = _arena()
    _fill_state(arena, (0, 1, 2), 2)
    before = arena.bytes.clone()
    arena.copy_pages((0, 1), (1, 0))
    assert torch.equal(arena.bytes[[1, 0]], before[[0, 1]])


def test_int8_rounds_by_half_a_scale_at_most_and_keeps_the_window() -> None:
    arena = _arena(12)
    raw, packed, back = _slots(arena)
    _fill_state(arena, raw, 3)
    arena.encode_state(raw, packed)
    arena.decode_state(packed, back)
    for layer, group in enumerate(arena.layout.group_of_layer):
        state = arena.views.recurrent[layer][raw[group]]
        again = arena.views.recurrent[layer][back[group]]
        scale = state.abs().amax(dim=1, keepdim=True) / 127
        assert ((state - again).abs() <= scale / 2 + 1e-7).all()
        assert torch.equal(
            arena.views.conv[layer][raw[group]], arena.views.conv[layer][back[group]]
        )


def test_rounding_a_rounded_state_again_changes_next_to_nothing() -> None:
    arena = _arena(12)
    raw, packed, back = _slots(arena)
    _fill_state(arena, raw, 4)
    arena.encode_state(raw, packed)
    arena.decode_state(packed, back)
    once = arena.views.recurrent[0][back[0]].clone()
    for _ in range(10):
        arena.encode_state(back, packed)
        arena.decode_state(packed, back)
    torch.testing.assert_close(arena.views.recurrent[0][back[0]], once, rtol=1e-5, atol=1e-6)


def test_a_state_of_zeros_comes_back_as_zeros() -> None:
    arena = _arena(12)
    raw, packed, _ = _slots(arena)
    arena.encode_state(raw, packed)
    arena.decode_state(packed, raw)
    assert not arena.bytes.any()


def test_spans_of_neighbouring_units_join() -> None:
    layout = plan_layout(_SMALL, 8)
    size = layout.unit_bytes
    joined = spans(layout, (0, 1, 2), (1, 2, 3))
    assert joined == [Span(0, size, 3 * size)]
    apart = spans(layout, (0, 2), (0, 1), (4,), (5,))
    assert [span.length for span in apart] == [size, size, layout.page_bytes]


def test_tables_of_unequal_length_are_refused_before_any_byte_moves() -> None:
    with pytest.raises(CacheError):
        spans(plan_layout(_SMALL, 8), (0, 1), (0,))
