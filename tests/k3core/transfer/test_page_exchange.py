import zlib
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3core.cache.layout import ModelSizes, plan_layout
from k3core.transfer.page_exchange import (
    Arena,
    check_layouts,
    checksum,
    layout_info,
    make_grant,
    pack_ids,
    state_writes,
    unit_writes,
    unpack_ids,
)
from k3wire.errors import Overloaded
from k3wire.messages.pages import PageGrant

SIZES = ModelSizes(
    mla_layers=2,
    row_elements=6,
    row_bytes=12,
    kda_layers=3,
    state_heads=2,
    head_dim=4,
    conv_width=4,
    conv_itemsize=2,
)
LAYOUT = plan_layout(SIZES, unit_tokens=16, num_groups=2, page_units=4)
HERE = Arena("here:1", 10_000_000, LAYOUT)
THERE = Arena("there:1", 90_000_000, LAYOUT)


def test_ids_travel_as_little_endian_int32() -> None:
    assert pack_ids([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"
    assert list(unpack_ids(pack_ids([7, 0, 2**31 - 1]))) == [7, 0, 2**31 - 1]


def test_equal_layouts_agree_and_every_difference_is_refused_with_both_values() -> None:
    ours = layout_info(LAYOUT, "model-a")
    check_layouts(ours, layout_info(LAYOUT, "model-a"))
    for name in ours.__struct_fields__:
        value = getattr(ours, name)
        other = value + 1 if isinstance(value, int) else f"{value}x"
        theirs = msgspec.structs.replace(ours, **{name: other})
        with pytest.raises(Overloaded) as caught:
            check_layouts(ours, theirs)
        assert repr(value) in caught.value.message
        assert repr(other) in caught.value.message


def test_a_page_whose_units_are_neighbours_on_both_sides_is_one_write() -> None:
    grant = make_grant(THERE, [8, 9, 10, 11], [5, 6], 0)
    writes = unit_writes(HERE, grant, [4, 5, 6, 7], 0)
    assert [write.size_bytes for write in writes] == [4 * LAYOUT.unit_bytes]
    assert writes[0].source == HERE.base_address + LAYOUT.page_bytes
    assert writes[0].destination == THERE.base_address + 2 * LAYOUT.page_bytes


def test_units_that_are_resident_there_are_not_sent() -> None:
    grant = make_grant(THERE, [0, 1, 8, 9], [5, 6], 2 * LAYOUT.unit_tokens)
    assert list(unpack_ids(grant.latent_units)) == [8, 9]
    writes = unit_writes(HERE, grant, [4, 5, 6], 0)
    assert sum(write.size_bytes for write in writes) == LAYOUT.unit_bytes
    assert writes[0].destination == THERE.base_address + 2 * LAYOUT.page_bytes


def test_a_state_is_one_write_for_each_group_that_stands_alone() -> None:
    grant = make_grant(THERE, [], [9, 2], 0)
    writes = state_writes(HERE, grant, [1, 5])
    assert [write.destination - THERE.base_address for write in writes] == [
        9 * LAYOUT.page_bytes,
        2 * LAYOUT.page_bytes,
    ]
    assert {write.size_bytes for write in writes} == {LAYOUT.page_bytes}


def test_the_checksum_runs_through_all_pages() -> None:
    assert checksum([memoryview(b"ab"), memoryview(b"c")]) == zlib.crc32(b"abc")


@given(data=st.data())
def test_pieces_of_a_prompt_sent_in_any_cuts_arrive_where_the_whole_would(
    data: st.DataObject,
) -> None:
    count = data.draw(st.integers(1, 20))
    ids = st.lists(st.integers(0, 79), min_size=count, max_size=count, unique=True)
    source, target = data.draw(ids), data.draw(ids)
    resident = data.draw(st.integers(0, count))
    grant = make_grant(THERE, target, [0, 1], resident * LAYOUT.unit_tokens)
    cut = data.draw(st.integers(0, count))
    pieces = [(0, source[:cut]), (cut, source[cut:])]
    moved: dict[int, int] = {}
    for first, units in pieces:
        for write in unit_writes(HERE, grant, units, first * LAYOUT.unit_tokens):
            for byte in range(0, write.size_bytes, LAYOUT.unit_bytes):
                moved[write.destination + byte] = write.source + byte
    assert moved == unit_map(grant, source[resident:], target[resident:])


def unit_map(grant: PageGrant, source: list[int], target: list[int]) -> dict[int, int]:
    def address(base: int, unit: int) -> int:
        page, place = divmod(unit, LAYOUT.page_units)
        return base + page * LAYOUT.page_bytes + place * LAYOUT.unit_bytes

    return {
        address(grant.base_address, there): address(HERE.base_address, here)
        for here, there in zip(source, target, strict=True)
    }


def test_another_arena_is_another_address() -> None:
    moved = replace(HERE, base_address=HERE.base_address + 64)
    grant = make_grant(THERE, [0], [0, 1], 0)
    (write,) = unit_writes(moved, grant, [0], 0)
    assert write.source == HERE.base_address + 64
