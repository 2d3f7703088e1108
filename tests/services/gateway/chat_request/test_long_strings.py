"""Pictures that are cut out of a body come back where they were, and change nothing else."""

import json
from random import Random
from typing import Any

import msgspec
import pytest
from support.hostile_chat import random_json, random_text

from k3_gateway.chat_request import long_strings
from k3_gateway.chat_request.bodies import decode_object
from k3_gateway.chat_request.long_strings import cut_long_strings
from k3wire.errors import InvalidJson


def url(num_bytes: int, *, tail: str = "") -> str:
    return "data:image/png;base64," + "QUJD" * (num_bytes // 4) + tail


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strings are long from sixty bytes on."""
    monkeypatch.setattr(long_strings, "LONG_STRING_BYTES", 60)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("seed", range(40))
def test_a_body_with_pictures_decodes_to_what_it_says(seed: int) -> None:
    random = Random(seed)

    def any_value() -> Any:
        kind = random.randrange(6)
        tail = random.choice(("", '"', "\\", "\n", "/", "é", '\\"data:', '"data:"'))
        if kind == 0:
            return url(random.randint(0, 200), tail=tail)
        if kind == 1:
            return random_text(random) + url(100, tail=tail)
        return [any_value(), {"a": any_value()}] if kind == 2 else random_json(random)

    value = {"b": [any_value() for _ in range(20)], '"data:': "\\", "data:": any_value()}
    text = json.dumps(value, ensure_ascii=random.random() < 0.5).encode()
    if random.random() < 0.5:
        text = text.replace(b"/", b"\\/")
    assert decode_object(bytearray(text), 10_000) == msgspec.json.decode(text)


def test_what_is_decoded_at_once_is_short_whatever_the_pictures_are() -> None:
    value = {"messages": [{"url": url(200_000)} for _ in range(3)]}
    text = json.dumps(value).encode()
    cut = cut_long_strings(text)
    assert len(cut.spans) == 3
    assert len(cut.text) < 1000
    assert decode_object(text, 300_000) == value


def test_what_only_looks_like_pictures_does_not_keep_pictures_in_the_text() -> None:
    log = 'print("data: {}")\n"data: [DONE]"' * 2000
    value = {"messages": [log, *[url(40)] * 2000, url(200_000)]}
    text = json.dumps(value).encode()
    assert len(cut_long_strings(text).spans) == 1
    assert decode_object(text, 300_000) == value


@pytest.mark.usefixtures("short")
def test_no_more_is_cut_out_than_can_be_pictures() -> None:
    value = {"messages": [url(100)] * (long_strings.MAX_CUTS + 5)}
    text = json.dumps(value).encode()
    assert len(cut_long_strings(text).spans) == long_strings.MAX_CUTS
    assert decode_object(text, 10_000) == value


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    "text",
    [
        '{"a": "x"URL}',
        '{"a": URL URL}',
        '{"a": "URL"}',
        '{"a": URL',
        "{URL: 1}",
        '{"a": "\\URL"}',
        '{"a": URL, "b": "\\ud800"}',
        '{"a": BAD}',
        '{"a": CUT',
    ],
)
def test_what_was_no_sound_body_is_none_without_its_pictures(text: str) -> None:
    given = text.replace("URL", f'"{url(400)}"').replace("BAD", f'"{url(400)}\n"')
    given = given.replace("CUT", f'"{url(400)}')
    with pytest.raises(InvalidJson):
        decode_object(given.encode(), 10_000)


def test_nobody_can_guess_the_names_of_what_was_cut_out() -> None:
    text = json.dumps({"b": url(200_000)}).encode()
    first, second = cut_long_strings(text), cut_long_strings(text)
    assert len({first.prefix, second.prefix}) == 2
    assert all(name.startswith(first.prefix) for name in first.spans)
