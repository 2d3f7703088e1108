"""The 256 special tokens that follow the base vocabulary, by name and by id.

The released vocabulary has 163,584 ranks, so its specials are 163,584 to 163,839. A smaller
vocabulary has the same specials behind its own ranks: a special's distance from the last rank is
what identifies it. Nothing here depends on the size of the base vocabulary.

Source: specs of the released `tokenizer_config.json` (`added_tokens_decoder`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

NUM_SPECIAL_TOKENS = 256
"""Slots behind the base ranks, named or reserved."""

OFFICIAL_NUM_BASE_RANKS = 163_584
"""Ranks of the released vocabulary; official ids below are counted from here."""

BOS = "[BOS]"
EOS = "[EOS]"
END_OF_MSG = "<|end_of_msg|>"
OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
EOT = "[EOT]"
MEDIA_BEGIN = "<|media_begin|>"
MEDIA_CONTENT = "<|media_content|>"
MEDIA_END = "<|media_end|>"
MEDIA_PAD = "<|media_pad|>"
UNK = "[UNK]"
PAD = "[PAD]"

OFFICIAL_NAMES: Mapping[int, str] = {
    163_584: BOS,
    163_585: EOS,
    163_586: END_OF_MSG,
    163_587: OPEN,
    163_588: CLOSE,
    163_589: SEP,
    163_590: "[start_header_id]",
    163_591: "[end_header_id]",
    163_593: EOT,
    163_602: MEDIA_BEGIN,
    163_603: MEDIA_CONTENT,
    163_604: MEDIA_END,
    163_605: MEDIA_PAD,
    163_649: "<osagent_mode>",
    163_838: UNK,
    163_839: PAD,
}
"""The named specials of the release, by official id; every other slot is reserved."""


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Ids of the specials that code speaks of, in one vocabulary."""

    bos: int
    eos: int
    end_of_msg: int
    open: int
    close: int
    sep: int
    eot: int
    media_begin: int
    media_content: int
    media_end: int
    media_pad: int
    unk: int
    pad: int


def special_id(official_id: int, num_base_ranks: int) -> int:
    """Gives the id in a vocabulary of `num_base_ranks` of a special known by its official id."""
    return num_base_ranks + official_id - OFFICIAL_NUM_BASE_RANKS


def special_names(
    num_base_ranks: int, added_names: Mapping[int, str] | None = None
) -> dict[int, str]:
    """Names all specials of a vocabulary.

    Args:
        num_base_ranks: ranks before the first special.
        added_names: names by id from a `tokenizer_config.json`; they win over the table. Ids
            outside the 256 slots are dropped: stale tokens of an older model carry ids at and
            above the vocabulary, for which the embedding has no row.

    Returns:
        name by id, for exactly the ids `num_base_ranks` to `num_base_ranks + 255`, all distinct.
    """
    names = {
        special_id(official, num_base_ranks): name for official, name in OFFICIAL_NAMES.items()
    }
    last = num_base_ranks + NUM_SPECIAL_TOKENS
    for token_id, name in (added_names or {}).items():
        if num_base_ranks <= token_id < last:
            for other in [key for key, value in names.items() if value == name]:
                del names[other]
            names[token_id] = name
    return {
        token_id: names.get(token_id, f"<|reserved_token_{token_id}|>")
        for token_id in range(num_base_ranks, last)
    }


def special_ids(names: Mapping[int, str]) -> SpecialIds:
    """Looks up the ids code speaks of.

    Args:
        names: name by id, as `special_names` gives.

    Raises:
        KeyError: a name is missing.
    """
    ids = {name: token_id for token_id, name in names.items()}
    return SpecialIds(
        bos=ids[BOS],
        eos=ids[EOS],
        end_of_msg=ids[END_OF_MSG],
        open=ids[OPEN],
        close=ids[CLOSE],
        sep=ids[SEP],
        eot=ids[EOT],
        media_begin=ids[MEDIA_BEGIN],
        media_content=ids[MEDIA_CONTENT],
        media_end=ids[MEDIA_END],
        media_pad=ids[MEDIA_PAD],
        unk=ids[UNK],
        pad=ids[PAD],
    )
