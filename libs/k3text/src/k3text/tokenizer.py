"""Text to token ids and back, as the released tokenizer does it.

Enters: a piece of text and whether marker names in it are markers. Leaves: token ids. A prompt is
made of many pieces, each encoded on its own, so that what a user typed can never become a marker.
"""

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Self

import tiktoken

from k3text.special_tokens import NUM_SPECIAL_TOKENS, SpecialIds, special_ids, special_names
from k3wire.errors import InvalidRequest

VOCABULARY_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"

SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How text is cut before merging; tiktoken's engine knows class intersection.

Source: the released `tokenization_kimi.py`, `pat_str`; the same as Kimi K2's.
"""

WINDOW_CHARS = 400_000
"""Longest text handed to the merger at once; longer text is cut every so many characters."""

MAX_RUN_CHARS = 25_000
"""Longest run without a change between space and non-space; a longer one is cut inside.

Both cuts are the released tokenizer's own (`tokenization_kimi.py`, `encode`), so ids agree with
it also there; they bound the stack and the time that one pathological word can take.
"""

_SURROGATE = re.compile("[\ud800-\udfff]")
_RUN = re.compile(r"\S+|\s+")


class VocabularyError(ValueError):
    """A vocabulary file is malformed; the message names the line."""


class Tokenizer:
    """A byte-level BPE vocabulary with K3's split and specials. Immutable; safe across threads.

    Attributes:
        num_base_ranks: ordinary tokens; ids 0 to num_base_ranks - 1.
        vocab_size: ordinary tokens and 256 specials.
        specials: ids of the named specials.
    """

    def __init__(
        self, ranks: Mapping[bytes, int], added_names: Mapping[int, str] | None = None
    ) -> None:
        """Builds a tokenizer.

        Args:
            ranks: rank by token; ranks are 0 to len - 1, every single byte is a token.
            added_names: names of specials by id, as `special_names` takes.

        Raises:
            VocabularyError: ranks with gaps, a byte without a token, or a special that K3 needs
                is renamed.
        """
        _check_ranks(ranks)
        self.num_base_ranks = len(ranks)
        self.vocab_size = len(ranks) + NUM_SPECIAL_TOKENS
        names = special_names(len(ranks), added_names)
        self.specials = _special_ids(names)
        self._special_names = names
        self._ids_by_name = {name: token_id for token_id, name in names.items()}
        self._encoding = tiktoken.Encoding(
            name="k3",
            pat_str=SPLIT_PATTERN,
            mergeable_ranks=dict(ranks),
            special_tokens=self._ids_by_name,
        )
        self._token_bytes = [b""] * len(ranks)
        for token, rank in ranks.items():
            self._token_bytes[rank] = token
        self._token_bytes.extend(names[token_id].encode() for token_id in sorted(names))

    @classmethod
    def from_directory(cls, directory: Path) -> Self:
        """Loads `tiktoken.model` and, if there is one, `tokenizer_config.json`.

        Raises:
            VocabularyError: a file is malformed.
            OSError: the vocabulary cannot be read.
        """
        ranks = parse_ranks((directory / VOCABULARY_FILE).read_bytes())
        config = directory / CONFIG_FILE
        return cls(ranks, parse_added_names(config.read_bytes()) if config.is_file() else None)

    def encode_segment(self, text: str, allow_special: bool = False) -> list[int]:
        """Encodes one piece of a prompt.

        Args:
            text: any text without lone surrogates.
            allow_special: whether names of specials become specials. False for everything that a
                user, a tool or a model wrote.

        Raises:
            InvalidRequest: the text has a lone surrogate, which no bytes can express.
        """
        if not text.isascii() and _SURROGATE.search(text):
            raise InvalidRequest(
                "A text has a lone surrogate (U+D800 to U+DFFF), which is no character; remove it"
            )
        encode = self._encode_special if allow_special else self._encoding.encode_ordinary
        if len(text) <= MAX_RUN_CHARS:
            return encode(text)
        ids: list[int] = []
        for piece in _release_pieces(text):
            ids.extend(encode(piece))
        return ids

    def encode_segments(self, segments: Iterable[tuple[str, bool]]) -> list[int]:
        """Encodes pieces one by one and joins the ids; each is (text, allow_special)."""
        ids: list[int] = []
        for text, allow_special in segments:
            ids.extend(self.encode_segment(text, allow_special))
        return ids

    def decode_bytes(self, token_ids: Iterable[int]) -> bytes:
        """Joins the bytes of tokens; a special gives its name. Cut characters stay cut.

        Raises:
            InvalidRequest: an id is outside the vocabulary.
        """
        return b"".join(map(self.token_bytes, token_ids))

    def token_bytes(self, token_id: int) -> bytes:
        """Gives the bytes of one token; a special gives its name.

        Raises:
            InvalidRequest: the id is outside the vocabulary.
        """
        if not 0 <= token_id < self.vocab_size:
            raise InvalidRequest(
                f"Token id {token_id} is outside the vocabulary of {self.vocab_size} tokens"
            )
        return self._token_bytes[token_id]

    def is_special(self, token_id: int) -> bool:
        """Says whether an id is one of the 256 specials."""
        return self.num_base_ranks <= token_id < self.vocab_size

    def special_id(self, name: str) -> int | None:
        """Gives the id of a special by name, or None."""
        return self._ids_by_name.get(name)

    def special_name(self, token_id: int) -> str | None:
        """Gives the name of a special by id, or None."""
        return self._special_names.get(token_id)

    def _encode_special(self, text: str) -> list[int]:
        token_id = self._ids_by_name.get(text)
        if token_id is not None:
            return [token_id]
        return self._encoding.encode(text, allowed_special="all", disallowed_special=())


def parse_ranks(data: bytes) -> dict[bytes, int]:
    """Reads a vocabulary file: a base64 token, a space and its rank on each line.

    Raises:
        VocabularyError: a line is malformed or repeats a token.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            encoded, rank = line.split()
            token = base64.b64decode(encoded, validate=True)
            value = int(rank)
        except (ValueError, binascii.Error) as error:
            raise VocabularyError(f"line {number}: want a base64 token and a rank") from error
        if token in ranks:
            raise VocabularyError(f"line {number}: the token is there twice")
        ranks[token] = value
    return ranks


def format_ranks(ranks: Mapping[bytes, int]) -> bytes:
    """Writes a vocabulary file, in the order of ranks; `parse_ranks` reads it."""
    ordered = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ordered)


def parse_added_names(data: bytes) -> dict[int, str]:
    """Reads the names of specials by id from a `tokenizer_config.json`.

    Raises:
        VocabularyError: the file is no such JSON.
    """
    try:
        table = json.loads(data).get("added_tokens_decoder", {})
        return {int(token_id): str(entry["content"]) for token_id, entry in table.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise VocabularyError("tokenizer_config.json: added_tokens_decoder is malformed") from error


def _special_ids(names: Mapping[int, str]) -> SpecialIds:
    try:
        return special_ids(names)
    except KeyError as error:
        raise VocabularyError(f"no special token is named {error.args[0]}") from error


def _check_ranks(ranks: Mapping[bytes, int]) -> None:
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise VocabularyError("ranks must be 0 to n - 1, each once")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise VocabularyError(f"bytes without a token: {missing[:8]}")


def _release_pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), WINDOW_CHARS):
        window = text[start : start + WINDOW_CHARS]
        begin = 0
        for cut in _run_cuts(window):
            yield window[begin:cut]
            begin = cut
        yield window[begin:]


def _run_cuts(window: str) -> list[int]:
    # A run that needs a cut covers one of these blocks whole; most text has none, and finding
    # that out costs a glance at each block instead of a walk over all runs.
    half = MAX_RUN_CHARS // 2
    blocks = (window[start : start + half] for start in range(0, len(window) - half + 1, half))
    if not any(block.isspace() or len(block.split(maxsplit=1)[0]) == half for block in blocks):
        return []
    return [
        cut
        for run in _RUN.finditer(window)
        if run.end() - run.start() > MAX_RUN_CHARS
        for cut in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS)
    ]
