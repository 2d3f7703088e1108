from k3text.special_tokens import (
    NUM_SPECIAL_TOKENS,
    OFFICIAL_NAMES,
    OFFICIAL_NUM_BASE_RANKS,
    special_ids,
    special_names,
)


def test_the_released_vocabulary_has_its_official_ids() -> None:
    names = special_names(OFFICIAL_NUM_BASE_RANKS)
    assert list(names) == list(range(163_584, 163_840))
    assert {at: name for at, name in names.items() if at in OFFICIAL_NAMES} == OFFICIAL_NAMES
    ids = special_ids(names)
    assert (ids.end_of_msg, ids.open, ids.close, ids.sep) == (163_586, 163_587, 163_588, 163_589)
    assert (ids.media_begin, ids.media_content, ids.media_end) == (163_602, 163_603, 163_604)
    assert (ids.media_pad, ids.unk, ids.pad) == (163_605, 163_838, 163_839)


def test_every_slot_has_a_name_of_its_own() -> None:
    for num_base_ranks in (256, 384, 768, OFFICIAL_NUM_BASE_RANKS):
        names = special_names(num_base_ranks)
        assert len(set(names.values())) == NUM_SPECIAL_TOKENS
        assert names[num_base_ranks + 8] == f"<|reserved_token_{num_base_ranks + 8}|>"


def test_names_of_a_config_win_and_ids_without_an_embedding_row_are_dropped() -> None:
    names = special_names(300, {299: "x", 308: "<|new|>", 310: "<|open|>", 556: "<|stale|>"})
    assert names[308] == "<|new|>"
    assert names[310] == "<|open|>"
    assert names[303] == "<|reserved_token_303|>"
    assert not {"x", "<|stale|>"} & set(names.values())
    assert len(names) == NUM_SPECIAL_TOKENS
