from pathlib import Path

import pytest

from k3text.tokenizer import Tokenizer
from k3text.vocabulary import SAMPLE_TEXT, learn_ranks, write_vocabulary


def test_a_vocabulary_has_the_bytes_first_and_the_size_asked_for() -> None:
    for num_ranks in (256, 384, 768):
        ranks = learn_ranks(num_ranks)
        assert list(ranks.values()) == list(range(num_ranks))
        assert list(ranks)[:256] == [bytes([byte]) for byte in range(256)]


def test_a_larger_vocabulary_of_the_same_text_begins_with_the_smaller() -> None:
    assert list(learn_ranks(768))[:384] == list(learn_ranks(384))


def test_merges_are_the_most_frequent_pairs_with_ties_by_bytes() -> None:
    ranks = learn_ranks(259, "abab abab cd cd")
    assert list(ranks)[256:] == [b"ab", b" c", b" cd"]


def test_every_merge_is_made_of_two_earlier_tokens() -> None:
    ranks = learn_ranks(768)
    for token, rank in ranks.items():
        if len(token) > 1:
            halves = [(token[:at], token[at:]) for at in range(1, len(token))]
            assert any(ranks.get(a, rank) < rank and ranks.get(b, rank) < rank for a, b in halves)


def test_the_file_loads_and_encodes_its_own_text_shorter_than_bytes(tmp_path: Path) -> None:
    write_vocabulary(tmp_path, 768)
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.vocab_size == 1024
    ids = tokenizer.encode_segment(SAMPLE_TEXT)
    assert tokenizer.decode_bytes(ids) == SAMPLE_TEXT.encode()
    assert len(ids) < len(SAMPLE_TEXT) / 2


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="256"):
        learn_ranks(255)
    with pytest.raises(ValueError, match="longer"):
        learn_ranks(300, "ab")
