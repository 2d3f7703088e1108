import json
import os
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import regex
import tiktoken
from support.hostile_chat import random_text

from k3text.special_tokens import OFFICIAL_NAMES, special_id
from k3text.tokenizer import (
    MAX_RUN_CHARS,
    SPLIT_PATTERN,
    WINDOW_CHARS,
    Tokenizer,
    VocabularyError,
    format_ranks,
    parse_ranks,
)
from k3text.vocabulary import learn_ranks
from k3wire.errors import InvalidRequest

BYTES = {bytes([byte]): byte for byte in range(256)}
RELEASED = os.environ.get("K3_RELEASED_TOKENIZER", "")


def naive_ids(ranks: dict[bytes, int], text: str) -> list[int]:
    """Byte-pair encoding by its definition: split, then merge the lowest rank until none is left."""
    ids: list[int] = []
    for word in regex.findall(f"(?V1){SPLIT_PATTERN}", text):
        parts = [bytes([byte]) for byte in word.encode()]
        while len(parts) > 1:
            ranked = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
            best = min(ranked)
            if best == len(ranks):
                break
            at = ranked.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids.extend(ranks[part] for part in parts)
    return ids


def test_ids_are_those_of_the_definition_on_hostile_text(tokenizer: Tokenizer) -> None:
    ranks = learn_ranks(384)
    for seed in range(400):
        text = random_text(Random(seed), 12)
        ids = tokenizer.encode_segment(text)
        assert ids == naive_ids(ranks, text)
        assert tokenizer.decode_bytes(ids) == text.encode()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("中文abc", ["中文", "abc"]),
        ("fooBAR", ["foo", "BAR"]),
        ("What's I'LL", ["What's", " I'LL"]),
        ("1234567890", ["123", "456", "789", "0"]),
        ("get_weather", ["get", "_weather"]),
        ("a  b\n\n c  ", ["a", " ", " b", "\n\n", " c", "  "]),
        ("x = {};\r\n", ["x", " =", " {};\r\n"]),
    ],
)
def test_text_is_cut_into_words_by_the_released_pattern(text: str, words: list[str]) -> None:
    ranks = BYTES | {
        word.encode(): 256 + at
        for at, word in enumerate(dict.fromkeys(words))
        if len(word.encode()) > 1
    }
    ranks = {token: rank for rank, token in enumerate(ranks)}
    tokenizer = Tokenizer(ranks)
    found = [tokenizer.token_bytes(token).decode() for token in tokenizer.encode_segment(text)]
    # Whole words are in the vocabulary, but merges are not: tiktoken takes a whole word at once.
    assert found == words


def test_marker_names_are_ordinary_text_unless_allowed(tokenizer: Tokenizer) -> None:
    for name in OFFICIAL_NAMES.values():
        text = f"a{name}b"
        ordinary = tokenizer.encode_segment(text)
        assert not any(map(tokenizer.is_special, ordinary))
        assert tokenizer.decode_bytes(ordinary) == text.encode()
        special = tokenizer.encode_segment(text, allow_special=True)
        assert special == [
            *tokenizer.encode_segment("a"),
            tokenizer.special_id(name),
            *tokenizer.encode_segment("b"),
        ]


def test_segments_are_encoded_one_by_one(tokenizer: Tokenizer) -> None:
    pieces = [("x", False), ("<|sep|>", True), (" t", False), ("he", False)]
    ids = tokenizer.encode_segments(pieces)
    assert ids == [token for piece in pieces for token in tokenizer.encode_segment(*piece)]
    assert ids != tokenizer.encode_segment("x<|sep|> the", allow_special=True)


def test_a_small_vocabulary_has_the_same_specials_behind_its_ranks(tokenizer: Tokenizer) -> None:
    assert (tokenizer.num_base_ranks, tokenizer.vocab_size) == (384, 640)
    for official, name in OFFICIAL_NAMES.items():
        assert tokenizer.special_id(name) == special_id(official, 384)
    assert tokenizer.specials.pad == 639
    assert tokenizer.special_name(384 + 8) == "<|reserved_token_392|>"


def test_long_text_is_cut_where_the_release_cuts_it(tokenizer: Tokenizer) -> None:
    ranks = learn_ranks(384)
    plain = tiktoken.Encoding(
        name="plain", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    run = "ab" * MAX_RUN_CHARS + "c"
    cases = {
        "x " + run + " y": [2 + MAX_RUN_CHARS, 2 + 2 * MAX_RUN_CHARS],
        " " * (MAX_RUN_CHARS + 1) + "end": [MAX_RUN_CHARS],
        "x" * MAX_RUN_CHARS + " y": [],
        "word " * (WINDOW_CHARS // 5 + 10): [WINDOW_CHARS],
        "y" + " " * (WINDOW_CHARS - 10): [
            1 + MAX_RUN_CHARS * number for number in range(1, WINDOW_CHARS // MAX_RUN_CHARS)
        ],
    }
    for text, cuts in cases.items():
        borders = [0, *cuts, len(text)]
        expected = [
            token
            for begin, end in pairwise(borders)
            for token in plain.encode_ordinary(text[begin:end])
        ]
        assert tokenizer.encode_segment(text) == expected


def test_a_lone_surrogate_is_refused_by_name(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode_segment("a\ud800b")


def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    for token_id in (-1, tokenizer.vocab_size, 163_840):
        with pytest.raises(InvalidRequest):
            tokenizer.decode_bytes([token_id])


def test_a_directory_gives_names_and_stale_tokens_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_bytes(format_ranks(learn_ranks(300)))
    names = {
        "302": "<|renamed|>",
        "305": "<|moved|>",
        "308": "<|sep|>",
        "555": "[PAD]",
        "556": "<|stale|>",
        "163840": "<|im_end|>",
    }
    config = {"added_tokens_decoder": {at: {"content": name} for at, name in names.items()}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(VocabularyError, match="end_of_msg"):
        Tokenizer.from_directory(tmp_path)
    del config["added_tokens_decoder"]["302"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.special_name(305) == "<|moved|>"
    assert tokenizer.specials.sep == 308
    assert tokenizer.special_id("<|stale|>") is None
    assert tokenizer.special_id("<|im_end|>") is None
    assert tokenizer.vocab_size == 556
    assert tokenizer.encode_segment("<|sep|>", allow_special=True) == [308]


@pytest.mark.parametrize(
    "data",
    [b"YQ==\n", b"YQ== x\n", b"!! 1\n", b"YQ== 0\nYQ== 1\n"],
)
def test_a_malformed_vocabulary_file_names_its_line(data: bytes) -> None:
    with pytest.raises(VocabularyError, match="line"):
        parse_ranks(data)


def test_a_vocabulary_without_a_byte_or_with_a_gap_is_refused() -> None:
    with pytest.raises(VocabularyError, match="bytes"):
        Tokenizer({token: rank for token, rank in BYTES.items() if rank < 255})
    with pytest.raises(VocabularyError, match="ranks"):
        Tokenizer(BYTES | {b"ab": 300})


def test_a_vocabulary_file_reads_back(tmp_path: Path) -> None:
    ranks = learn_ranks(400)
    assert parse_ranks(format_ranks(ranks)) == ranks


@pytest.mark.skipif(not RELEASED, reason="set K3_RELEASED_TOKENIZER to a released directory")
def test_the_released_vocabulary_gives_the_published_ids() -> None:
    tokenizer = Tokenizer.from_directory(Path(RELEASED))
    assert (tokenizer.num_base_ranks, tokenizer.vocab_size) == (163_584, 163_840)
    vectors = {
        "What's": [58434],
        "100": [1570],
        "1234567890": [6694, 12972, 16242, 15],
        "get_weather": [618, 21055, 2800],
        "fooBAR": [10570, 44894],
        "中文abc": [16717, 8497],
    }
    for text, ids in vectors.items():
        assert tokenizer.encode_segment(text) == ids
    marked = tokenizer.encode_segment("<|close|>think<|sep|>", allow_special=True)
    assert marked == [163588, 39964, 163589]
    lengths = {"QUJDRA" * 5000: 19999, " " * 30000 + "end": 121, "word " * 100_000: 100_002}
    for text, num_tokens in lengths.items():
        assert len(tokenizer.encode_segment(text)) == num_tokens
