import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3text.parsers.arguments import ArgumentsWriter


def write(*blocks: tuple[str, str, str], step: int = 0) -> tuple[str, ArgumentsWriter]:
    """Arguments of (key, type, body) blocks, the bodies fed `step` bytes at a time."""
    writer = ArgumentsWriter()
    text = ""
    for key, type_name, body in blocks:
        text += writer.begin_argument(key, type_name)
        data = body.encode()
        size = step or len(data) or 1
        for begin in range(0, len(data), size):
            text += writer.feed(data[begin : begin + size])
        text += writer.end_block()
    return text + writer.end_call(), writer


def test_strings_are_escaped_and_everything_else_is_copied() -> None:
    text, writer = write(
        ("s", "string", 'a"b\\c\n\x00é'),
        ("n", "number", "-1.50e+3"),
        ("b", "boolean", "true"),
        ("z", "null", "null"),
        ("o", "object", '{"k": [1, {"x": "}\\""}]}'),
        ("a", "array", "[ 1,2 ]"),
    )
    assert text == (
        '{"s":"a\\"b\\\\c\\n\\u0000é","n":-1.50e+3,"b":true,"z":null,'
        '"o":{"k": [1, {"x": "}\\""}]},"a":[ 1,2 ]}'
    )
    assert writer.num_malformed == 0


def test_space_around_a_value_that_is_no_string_is_dropped() -> None:
    text, writer = write(
        ("n", "number", " 1\n"), ("a", "array", "\n[1] \n"), ("s", "string", " x ")
    )
    assert (text, writer.num_malformed) == ('{"n":1,"a":[1],"s":" x "}', 0)


@pytest.mark.parametrize("body", ["", " ", "True", "NaN", "1,2", "abc", "01", "-", '"', "1 2"])
def test_a_word_that_is_no_json_becomes_a_string_and_is_counted(body: str) -> None:
    text, writer = write(("n", "number", body))
    assert json.loads(text) == {"n": body}
    assert writer.num_malformed == 1


def test_a_type_that_is_missing_or_wrong_gives_way_to_the_value() -> None:
    text, writer = write(("a", "", "1"), ("b", "integer", "1"), ("c", "number", "[1]"))
    assert (text, writer.num_malformed) == ('{"a":"1","b":1,"c":[1]}', 0)


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ('["a', ["a"]),
        ('["a\\', ["a\\"]),
        ('{"a":[1', {"a": [1]}),
        ("[1]]", [1]),
        ("[1] x", [1]),
        ("[1}", [1]),
        ("[\\1]", [1]),
        ("[\x011]", [1]),
    ],
)
def test_a_broken_container_stays_one_value_and_is_counted(body: str, value: object) -> None:
    for step in (0, 1):
        text, writer = write(("v", "array", body), ("w", "number", "2"), step=step)
        assert writer.num_malformed == 1
        assert json.loads(text) == {"v": value, "w": 2}


def test_a_container_that_is_no_json_inside_is_passed_on_and_counted() -> None:
    for body in ("{'a': 1}", '{"a" 1}', "[1,]"):
        for step in (0, 1):
            text, writer = write(("v", "object", body), ("w", "number", "2"), step=step)
            assert text == '{"v":' + body + ',"w":2}'
            assert writer.num_malformed == 1


def test_control_characters_in_strings_of_a_container_are_escaped() -> None:
    for step in (0, 1):
        text, writer = write(("v", "object", '{"a":"x\ny\\\nz\\""}'), step=step)
        assert json.loads(text) == {"v": {"a": 'x\ny\nz"'}}
        assert writer.num_malformed == 0


def test_keys_written_twice_are_counted_and_the_last_is_read() -> None:
    text, writer = write(("k", "number", "1"), ("k", "string", "x"))
    assert (text, writer.num_duplicate_keys) == ('{"k":1,"k":"x"}', 1)
    assert json.loads(text) == {"k": "x"}


def test_of_a_raw_block_and_argument_blocks_the_first_kind_counts() -> None:
    writer = ArgumentsWriter()
    text = writer.begin_raw() + writer.feed(b'{"a": 1}') + writer.end_block()
    text += writer.begin_argument("b", "number") + writer.feed(b"2") + writer.end_block()
    assert text + writer.end_call() == '{"a": 1}'
    assert writer.num_malformed == 1
    writer = ArgumentsWriter()
    text = writer.begin_argument("b", "number") + writer.feed(b"2") + writer.end_block()
    text += writer.begin_raw() + writer.feed(b'{"a": 1}') + writer.end_block()
    assert text + writer.end_call() == '{"b":2}'


@given(
    body=st.one_of(
        st.text('[]{}",:\\ax1\n ', max_size=30),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=5),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
        ).map(lambda value: json.dumps(value, ensure_ascii=False)),
    ),
    type_name=st.sampled_from(["string", "number", "object", "array", "null", ""]),
    step=st.integers(1, 7),
)
def test_the_text_does_not_depend_on_how_bytes_came(body: str, type_name: str, step: int) -> None:
    whole, first = write(("k", type_name, body), ("l", "number", "1"))
    pieces, second = write(("k", type_name, body), ("l", "number", "1"), step=step)
    assert (pieces, second.num_malformed) == (whole, first.num_malformed)
    if type_name in ("string", ""):
        assert json.loads(whole) == {"k": body, "l": 1}
    elif first.num_malformed == 0:
        try:
            expected = json.loads(body)
        except json.JSONDecodeError:
            return
        assert json.loads(whole) == {"k": expected, "l": 1}


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_raw_block_is_an_empty_object(text: str) -> None:
    writer = ArgumentsWriter()
    found = writer.begin_raw() + writer.feed(text.encode()) + writer.end_block()
    assert json.loads(found + writer.end_call()) == {}
