from pathlib import Path

import pytest

from k3core.engine.script import (
    Script,
    ScriptError,
    ScriptLine,
    load_script,
    parse_script,
    split_markers,
)
from k3wire.errors import InvalidRequest


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_a_script_is_read_line_by_line_with_its_tokens_and_delays(tmp_path: Path) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text(
        '{"match": "cat", "text": "ab"}\n'
        "\n"
        '{"match": "", "token_ids": [5, 6], "first_token_ms": 40, "per_token_ms": 2.5,'
        ' "split_every": 3}\n'
    )
    assert load_script(path, letters) == Script(
        lines=(
            ScriptLine("cat", (97, 98), 0.0, 0.0, 1),
            ScriptLine("", (5, 6), 0.04, 0.0025, 3),
        )
    )


def test_the_first_line_that_occurs_in_the_last_user_text_answers() -> None:
    script = parse_script(
        '{"match": "cat", "token_ids": [1]}\n{"match": "a cat", "token_ids": [2]}\n'
        '{"match": "dog", "token_ids": [3]}',
        letters,
    )
    assert script.find("look, a cat and a dog") == 0
    assert script.find("my dog") == 2
    with pytest.raises(InvalidRequest):
        script.find("a bird")


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[1]",
        '{"text": "no match key"}',
        '{"match": "a"}',
        '{"match": "a", "text": "b", "token_ids": [1]}',
        '{"match": "a", "token_ids": [-1]}',
        '{"match": "a", "text": "b", "per_token_ms": -1}',
        '{"match": "a", "text": "b", "split_every": 0}',
        '{"match": "a", "text": "b", "speed": 3}',
    ],
)
def test_a_malformed_line_is_named(line: str) -> None:
    with pytest.raises(ScriptError, match="line 2"):
        parse_script('{"match": "", "text": "fine"}\n' + line, letters)


def test_a_script_without_lines_or_without_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScriptError):
        parse_script("\n\n", letters)
    with pytest.raises(ScriptError):
        load_script(tmp_path / "absent.jsonl", letters)


def test_markers_are_cut_out_of_a_text_and_nothing_is_lost() -> None:
    text = "<|open|>think<|sep|>a <|b|> c<|close|>think<|sep|><|end_of_msg|>"
    pieces = split_markers(text)
    assert "".join(piece for piece, _ in pieces) == text
    assert [piece for piece, is_marker in pieces if is_marker] == [
        "<|open|>",
        "<|sep|>",
        "<|close|>",
        "<|sep|>",
        "<|end_of_msg|>",
    ]
    assert [piece for piece, is_marker in pieces if not is_marker] == [
        "think",
        "a <|b|> c",
        "think",
    ]


def test_equal_scripts_have_equal_fingerprints_and_others_differ() -> None:
    one = parse_script('{"match": "", "token_ids": [1, 2]}', letters)
    same = parse_script('{"token_ids": [1, 2], "match": ""}', letters)
    other = parse_script('{"match": "", "token_ids": [1, 3]}', letters)
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()
