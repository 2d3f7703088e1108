"""The compiled chain gives the digests of hashlib, and where it cannot be had hashlib gives them."""

import logging
from array import array
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3core.cache.hashing import ImageMark, extend_digests
from k3core.cache.native import chain
from k3core.cache.native.chain import NativeChain, load_chain, native_chain
from k3core.kernels.errors import BackendUnavailableError
from k3core.kernels.native.build import build_library, find_toolchain

_TOKENS = array("i", (place * 2_654_435_761 % 2**32 - 2**31 for place in range(6_000)))
_IMAGES = tuple(ImageMark(at, 9, bytes([at % 251]) * 32) for at in (0, 70, 79, 1_000, 4_321))
_CUTS = (1, 640, 641, 2_815, 5_999, 6_000)


@pytest.fixture(scope="module")
def native() -> NativeChain:
    found = native_chain()
    if found is None:
        pytest.skip("no compiler or no SHA instructions here")
    return found


@pytest.fixture
def without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("PATH", str(tmp_path))
    native_chain.cache_clear()
    yield
    native_chain.cache_clear()


def _chain_of_hashlib(parent: bytes, units: bytes, borders: tuple[int, int, int]) -> list[bytes]:
    """The definition, written without any thrift: each digest anew from its group's parent."""
    unit_bytes, until_border, group_units = borders
    digests: list[bytes] = []
    low, border = 0, until_border
    for unit in range(len(units) // unit_bytes):
        if unit == border:
            parent, low, border = digests[-1], unit, border + group_units
        data = parent + units[low * unit_bytes : (unit + 1) * unit_bytes]
        digests.append(sha256(data).digest()[:16])
    return digests


@given(st.data())
def test_any_run_has_the_digests_of_hashlib(native: NativeChain, data: st.DataObject) -> None:
    unit_bytes = 4 * data.draw(st.integers(1, 140))
    group = data.draw(st.integers(1, 20))
    until_border = data.draw(st.integers(1, group))
    units = bytearray(data.draw(st.randoms()).randbytes(unit_bytes * data.draw(st.integers(1, 50))))
    num_units = len(units) // unit_bytes
    num_seen = data.draw(st.integers(0, min(until_border, num_units) - 1))
    parent, borders = bytes(units[:4]) * 4, (unit_bytes, until_border, group)
    whole = _chain_of_hashlib(parent, bytes(units), borders)
    grown = whole[:num_seen]
    with memoryview(units) as view:
        native.append_run(grown, parent, view, num_seen, borders)
    assert grown == whole


def test_padding_is_right_for_every_length_of_the_last_block(native: NativeChain) -> None:
    units = bytearray(range(256)) * 2
    # A unit of one byte is none of tokens, but reaches every place at which a message may end.
    for length in range(1, 140):
        with memoryview(units)[:length] as view:
            grown: list[bytes] = []
            native.append_run(grown, b"p" * 16, view, 0, (1, 200, 200))
        assert grown == _chain_of_hashlib(b"p" * 16, bytes(units[:length]), (1, 200, 200))


def _grow(unit_tokens: int) -> list[bytes]:
    digests: list[bytes] = []
    for end in _CUTS:
        extend_digests(digests, b"r" * 16, _TOKENS[:end], unit_tokens, _IMAGES)
    return digests


@pytest.mark.parametrize("unit_tokens", [1, 10, 128])
@pytest.mark.usefixtures("native", "without_a_compiler")
def test_without_a_compiler_the_digests_are_the_same_and_it_is_said(
    unit_tokens: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        plain = _grow(unit_tokens)
    assert native_chain() is None
    assert [record.name for record in caplog.records] == [chain.__name__]
    monkeypatch.undo()
    native_chain.cache_clear()
    assert native_chain() is not None
    assert _grow(unit_tokens) == plain


def test_a_processor_without_the_instructions_is_left_to_hashlib(tmp_path: Path) -> None:
    sources = tmp_path / "src"
    sources.mkdir()
    export = '__attribute__((visibility("default")))'
    (sources / "none.c").write_text(f"{export} int k3_can_chain(void) {{ return 0; }}\n")
    library = build_library(tmp_path / "cache", find_toolchain(), source_dir=sources)
    with pytest.raises(BackendUnavailableError, match="instructions"):
        load_chain(library)


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "k3.so"
    broken.write_bytes(b"not an object")
    with pytest.raises(BackendUnavailableError, match="does not load"):
        load_chain(broken)
