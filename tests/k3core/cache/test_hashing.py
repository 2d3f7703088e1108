"""A digest names a whole prefix: everything that must tell apart does, nothing else does."""

import subprocess
import sys
from array import array
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3core.cache.hashing import (
    GROUP_UNITS,
    ImageMark,
    extend_digests,
    namespace_digest,
    root_digest,
)
from k3core.cache.spec import CacheError

_ROOT = root_digest(b"model", 4)


def _chain(
    tokens: list[int], root: bytes = _ROOT, images: tuple[ImageMark, ...] = ()
) -> list[bytes]:
    digests: list[bytes] = []
    extend_digests(digests, root, array("i", tokens), 4, images)
    return digests


def _picture(offset: int, count: int, name: str = "cat") -> ImageMark:
    return ImageMark(offset, count, sha256(name.encode()).digest())


def test_only_full_units_have_a_digest() -> None:
    assert len(_chain(list(range(11)))) == 2


def test_a_chain_can_be_extended_token_by_token() -> None:
    tokens = array("i", range(23))
    grown: list[bytes] = []
    for end in range(24):
        extend_digests(grown, _ROOT, tokens[:end], 4)
    assert grown == _chain(list(range(23)))


def test_a_chain_of_many_groups_can_be_extended_anywhere() -> None:
    count = 4 * (3 * GROUP_UNITS + 5)
    whole = _chain(list(range(count)))
    for held in (1, GROUP_UNITS - 1, GROUP_UNITS, GROUP_UNITS + 1, 2 * GROUP_UNITS + 17):
        grown = whole[:held]
        extend_digests(grown, _ROOT, array("i", range(count)), 4)
        assert grown == whole


def test_every_change_of_a_token_changes_its_digest_and_all_after_it() -> None:
    count = 4 * (2 * GROUP_UNITS + 3)
    plain = _chain([0] * count)
    for place in (0, 4 * GROUP_UNITS - 1, 4 * GROUP_UNITS, count - 1):
        changed = [0] * count
        changed[place] = 1
        equal = [a == b for a, b in zip(plain, _chain(changed), strict=True)]
        assert equal == [unit < place // 4 for unit in range(count // 4)]


def test_no_two_units_of_equal_tokens_share_a_digest() -> None:
    plain = _chain([0] * 4 * (3 * GROUP_UNITS))
    assert len(set(plain)) == len(plain)


def test_tokens_that_spell_a_picture_are_not_taken_for_it() -> None:
    # A picture adds 48 bytes to its unit, which is what three units of four tokens hold.
    image = _picture(0, 4)
    spelled = array("i", image.key + bytes(8) + (4).to_bytes(8, "little"))
    pictured = _chain([0] * 16, images=(image,))
    assert not set(pictured) & set(_chain([0, 0, 0, 0, *spelled]))


@given(st.data())
def test_any_cut_and_any_pictures_give_the_digests_of_one_go(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 4 * 2 * GROUP_UNITS + 30))
    images: list[ImageMark] = []
    place = data.draw(st.integers(0, 300))
    while place < length and len(images) < 6:
        images.append(_picture(place, data.draw(st.integers(1, 20)), str(len(images))))
        place += images[-1].count + data.draw(st.integers(0, 300))
    tokens = array("i", range(length))
    grown: list[bytes] = []
    for end in sorted({*data.draw(st.lists(st.integers(0, length), max_size=5)), length}):
        extend_digests(grown, _ROOT, tokens[:end], 4, images)
    assert grown == _chain(list(range(length)), images=tuple(images))


def test_equal_units_after_unequal_ones_differ() -> None:
    first, second = _chain([9, 1, 2, 3, 4, 5, 6, 7]), _chain([8, 1, 2, 3, 4, 5, 6, 7])
    assert first[1] != second[1]


def test_a_picture_changes_every_unit_it_overlaps_and_what_follows_and_nothing_before() -> None:
    plain = _chain([0] * 24)
    seen = _chain([0] * 24, images=(_picture(7, 6),))
    assert [a == b for a, b in zip(plain, seen, strict=True)] == [True, *[False] * 5]


@pytest.mark.parametrize("other", [_picture(6, 6), _picture(7, 5), _picture(7, 6, "dog")])
def test_cac_04_offset_size_and_content_of_a_picture_all_count(other: ImageMark) -> None:
    assert _chain([0] * 24, images=(_picture(7, 6),))[-1] != _chain([0] * 24, images=(other,))[-1]


def test_pictures_hashed_in_pieces_give_the_digests_of_one_go() -> None:
    images = (_picture(3, 6), _picture(9, 7, "dog"))
    tokens = array("i", [0] * 24)
    grown: list[bytes] = []
    for end in (3, 8, 9, 20, 24):
        extend_digests(grown, _ROOT, tokens[:end], 4, images)
    assert grown == _chain([0] * 24, images=images)


def test_roots_differ_in_every_field() -> None:
    roots = [
        root_digest(b"model", 4),
        root_digest(b"other", 4),
        root_digest(b"model", 8),
        root_digest(b"model", 4, salt="x"),
        root_digest(b"model", 4, adapter="x"),
    ]
    assert len(set(roots)) == len(roots)


def test_namespaces_do_not_depend_on_the_order_of_fields_but_on_their_borders() -> None:
    fields = [("revision", "ab"), ("dtype", "fp8")]
    assert namespace_digest(fields) == namespace_digest(fields[::-1])
    assert namespace_digest([("a", "bc")]) != namespace_digest([("ab", "c")])


def test_another_process_computes_the_same_digests() -> None:
    code = (
        "from array import array; from k3core.cache.hashing import *;"
        "d=[]; extend_digests(d, root_digest(b'model', 4), array('i', range(1024)), 4);"
        "print(d[-1].hex())"
    )
    output = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"PYTHONHASHSEED": "7"},
    ).stdout
    assert output.strip() == _chain(list(range(1024)))[-1].hex()


def test_a_key_that_was_folded_is_refused() -> None:
    with pytest.raises(CacheError):
        ImageMark(0, 4, b"\x01\x02")
