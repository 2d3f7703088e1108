import pytest

from k3text.chat_format.arguments import Argument, split_arguments
from k3text.chat_format.conversation import JsonObject


def test_a_parsed_object_is_written_with_python_separators() -> None:
    arguments: JsonObject = {
        "s": "raw é",
        "n": 5,
        "f": 1.5,
        "b": True,
        "z": None,
        "o": {"k": "ü", "l": [1, 2]},
        "a": [1, "two"],
    }
    assert split_arguments(arguments) == [
        Argument("s", "string", "raw é"),
        Argument("n", "number", "5"),
        Argument("f", "number", "1.5"),
        Argument("b", "boolean", "true"),
        Argument("z", "null", "null"),
        Argument("o", "object", '{"k": "ü", "l": [1, 2]}'),
        Argument("a", "array", '[1, "two"]'),
    ]


def test_a_string_keeps_the_literal_of_every_value_but_strings() -> None:
    text = ' {"a":1e2, "b" : [1,2],\n"c":"x\\u00e9\\n", "a":-0.0}  trailing'
    assert split_arguments(text) == [
        Argument("a", "number", "1e2"),
        Argument("b", "array", "[1,2]"),
        Argument("c", "string", "xé\n"),
        Argument("a", "number", "-0.0"),
    ]


def test_control_characters_in_strings_are_tolerated() -> None:
    assert split_arguments('{"a":"x\ny"}') == [Argument("a", "string", "x\ny")]


def test_empty_arguments_have_no_blocks() -> None:
    for empty in ("", "{}", " { } ", {}):
        assert split_arguments(empty) == []


@pytest.mark.parametrize(
    "text",
    [
        " ", "null", "[]", '"x"', "{", '{"a"}', '{"a":}', '{"a":1', '{"a":1,}', "{1:2}",
        '{"a":1 "b":2}', '{"a":"\\ud800"}', '{"\\udfff":1}', "\u00a0{}", '{"a":' + "[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_object_is_none(text: str) -> None:
    assert split_arguments(text) is None


def test_a_number_of_any_length_is_kept() -> None:
    digits = "9" * 10_000
    assert split_arguments('{"n":' + digits + "}") == [Argument("n", "number", digits)]
