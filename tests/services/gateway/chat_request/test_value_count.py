"""Values are counted alike wherever a text is cut, and too many are refused."""

import json
from random import Random

import pytest
from support.hostile_chat import random_json

from k3_gateway.chat_request.value_count import MAX_VALUES, ValueCounter
from k3wire.errors import InvalidJson


def count(text: bytes) -> int:
    """The same, a byte at a time."""
    num_values, is_in_string, is_escaped = 0, False, False
    for byte in text.decode("latin-1"):
        if is_escaped:
            is_escaped = False
        elif byte == "\\":
            is_escaped = True
        elif byte == '"':
            is_in_string = not is_in_string
        elif not is_in_string and byte in ",:[{":
            num_values += 1
    return num_values


@pytest.mark.parametrize("seed", range(40))
def test_the_count_is_that_of_a_reader_of_single_bytes(seed: int) -> None:
    random = Random(seed)
    value = [random_json(random, 3), '\\"', "\\\\", '"', {"\\": ",[{:"}]
    text = json.dumps(value, ensure_ascii=random.random() < 0.5).encode()
    for longest in (1, 2, 7, len(text)):
        counter, at = ValueCounter(), 0
        while at < len(text):
            size = random.randint(1, longest)
            counter.feed(text[at : at + size])
            at += size
        assert counter.num_values == count(text)


@pytest.mark.parametrize("value", [b"[", b"[],", b'"",', b'"\\"\\\\",', b'{"a":1},', b"1,"])
def test_more_values_than_may_be_are_refused_before_their_end(value: bytes) -> None:
    counter = ValueCounter()
    with pytest.raises(InvalidJson):
        for _ in range(100):
            counter.feed(value * 10_000)
    assert counter.num_values < 2 * MAX_VALUES


def test_marks_within_strings_are_text() -> None:
    counter = ValueCounter(max_values=4)
    for chunk in (b'{"a": "', b"[,{:" * 100_000, b'\\"' * 100_000, b",[", b'", "b": 1}'):
        counter.feed(chunk)
    with pytest.raises(InvalidJson):
        counter.feed(b",")
