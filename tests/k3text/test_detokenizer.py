from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from k3text.detokenizer import Detokenizer
from k3text.tokenizer import Tokenizer

BYTES = Tokenizer({bytes([byte]): byte for byte in range(256)})


def pieces(data: bytes) -> list[str]:
    detokenizer = Detokenizer(BYTES)
    return [*(detokenizer.feed([byte]) for byte in data), detokenizer.finish()]


def test_a_character_shows_when_its_last_byte_comes() -> None:
    assert pieces("aé中🚀".encode()) == ["a", "", "é", "", "", "中", "", "", "", "🚀", ""]


def test_a_cut_character_becomes_one_mark_at_the_end() -> None:
    assert pieces("x🚀".encode()[:-1]) == ["x", "", "", "", "\ufffd"]


def test_invalid_bytes_show_at_once_and_take_no_neighbour_along() -> None:
    assert pieces(b"a\xffb") == ["a", "\ufffd", "b", ""]
    assert pieces(b"\xe4\xb8A") == ["", "", "\ufffdA", ""]


def test_specials_are_left_out_or_named() -> None:
    ids = [*b"a", BYTES.specials.sep, *b"b"]
    assert Detokenizer(BYTES).feed(ids) == "ab"
    assert Detokenizer(BYTES, skip_special_tokens=False).feed(ids) == "a<|sep|>b"


def test_ending_twice_gives_nothing_more() -> None:
    detokenizer = Detokenizer(BYTES)
    detokenizer.feed([0xE4])
    assert (detokenizer.finish(), detokenizer.finish()) == ("\ufffd", "")


@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(0, 40), max_size=6))
def test_the_joined_text_does_not_depend_on_the_deltas(data: bytes, cuts: list[int]) -> None:
    detokenizer = Detokenizer(BYTES)
    borders = [0, *sorted(cuts), 40]
    text = "".join(detokenizer.feed(data[begin:end]) for begin, end in pairwise(borders))
    assert text + detokenizer.finish() == data.decode("utf-8", "replace")
