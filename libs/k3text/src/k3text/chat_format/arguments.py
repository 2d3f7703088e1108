"""Arguments of a tool call in history, cut into the typed blocks K3 writes them in."""

import json
import re
from dataclasses import dataclass

from k3text.chat_format.conversation import JsonObject, JsonValue

_SURROGATE = re.compile("[\ud800-\udfff]")
_SPACES = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument block.

    Attributes:
        key: unescaped.
        type_name: string, number, boolean, null, object or array.
        text: its body: a string raw, everything else JSON.
    """

    key: str
    type_name: str
    text: str


def split_arguments(arguments: str | JsonObject) -> list[Argument] | None:
    """Cuts arguments into blocks, one for each top-level key, in order, duplicates kept.

    A string is cut one level deep and every value that is no string keeps its literal text, so
    that `1e2` and `[1,2]` come back as the model wrote them and a cached prefix stays valid. A
    parsed object has no literals left; its values are written with Python's default separators.

    Returns:
        the blocks, none for an empty string or object; or None if the string is no JSON object,
        which renders as one raw block. What follows the closing brace is ignored.

    Source: `normalize_tool_arguments` of the release's `encoding_k3.py`. One departure: a value
    with a lone surrogate makes a raw block here, where the release fails to encode.
    """
    if isinstance(arguments, dict):
        return [
            Argument(key, _type_name(value), _value_text(value)) for key, value in arguments.items()
        ]
    if not arguments:
        return []
    try:
        return _split_object(arguments)
    except (ValueError, RecursionError):
        return None


# Numbers are only told from the rest: their text is kept, and converting a long one costs.
_DECODER = json.JSONDecoder(strict=False, parse_int=lambda _: 0, parse_float=lambda _: 0.0)


def _split_object(text: str) -> list[Argument]:
    position = _skip_spaces(text, 0)
    if text[position : position + 1] != "{":
        raise ValueError("no object")
    position = _skip_spaces(text, position + 1)
    if text[position : position + 1] == "}":
        return []
    found: list[Argument] = []
    while True:
        key, position = _decode(text, position)
        if not isinstance(key, str):
            raise ValueError("a key is no string")
        position = _skip_spaces(text, position)
        if text[position : position + 1] != ":":
            raise ValueError("no colon after a key")
        start = _skip_spaces(text, position + 1)
        value, position = _decode(text, start)
        body = value if isinstance(value, str) else text[start:position]
        found.append(Argument(key, _type_name(value), body))
        position = _skip_spaces(text, position)
        separator = text[position : position + 1]
        if separator == "}":
            return found
        if separator != ",":
            raise ValueError("neither comma nor brace after a value")
        position = _skip_spaces(text, position + 1)


def _decode(text: str, position: int) -> tuple[JsonValue, int]:
    value: JsonValue
    value, end = _DECODER.raw_decode(text, position)
    if isinstance(value, str) and _SURROGATE.search(value):
        raise ValueError("a lone surrogate")
    return value, end


def _skip_spaces(text: str, position: int) -> int:
    match = _SPACES.match(text, position)
    assert match is not None
    return match.end()


def _type_name(value: JsonValue) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, dict):
        return "object"
    return "array" if isinstance(value, list) else "number"


def _value_text(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
