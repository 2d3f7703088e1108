"""Request bodies: judged by their headers, decoded strictly and in short turns.

Nothing is trusted: the media type, the length the client claims, depth, surrogates. What one call
decodes is bounded, since nothing else runs meanwhile, on the loop or off it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import msgspec

from k3_gateway.chat_request.fields import JsonObject
from k3_gateway.chat_request.long_strings import CutText, cut_long_strings
from k3wire.errors import (
    ImageFileTooLarge,
    InvalidJson,
    RequestTooLarge,
    UnsupportedMediaType,
)

MAX_DEPTH = 64
"""Deepest nesting of arrays and objects; real requests stay under 20."""

MAX_LENGTH_DIGITS = 18

MAX_TEXT_BYTES = 16 * 1024 * 1024
"""Longest body without its pictures: sixteen bytes for each token of the longest context."""


def check_headers(headers: Mapping[str, str], max_bytes: int) -> int:
    """Refuses a body by its headers alone.

    Returns:
        the announced length, 0 if there is none.

    Raises:
        UnsupportedMediaType: not JSON, or compressed.
        RequestTooLarge: the announced length is over the limit.
        InvalidJson: the announced length is no number.
    """
    media_type = headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaType("Send the body as 'Content-Type: application/json'")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("Send the body without Content-Encoding")
    length = headers.get("content-length")
    if length is None:
        return 0
    if not (length.isascii() and length.isdigit()):
        raise InvalidJson("Content-Length must be a whole number")
    # Python reads no number of thousands of digits.
    if len(length) > MAX_LENGTH_DIGITS or int(length) > max_bytes:
        raise too_large(max_bytes)
    return int(length)


def too_large(max_bytes: int) -> RequestTooLarge:
    """The error for a body over the limit."""
    return RequestTooLarge(
        f"The body is larger than {max_bytes} bytes; send less or smaller images"
    )


def decode_object(body: bytes | bytearray, max_url_bytes: int) -> JsonObject:
    """Decodes a JSON object; holds the interpreter for a tenth of a second at most at a time.

    Args:
        body: with at most `value_count.MAX_VALUES` values.
        max_url_bytes: longest data URL, in its encoded form.

    Raises:
        InvalidJson: not JSON, not an object, too deep, or with lone surrogates.
        RequestTooLarge: its text is too long.
        ImageFileTooLarge: a data URL is.
    """
    cut = cut_long_strings(body)
    if len(cut.text) > MAX_TEXT_BYTES:
        raise _too_much_text()
    value = _decode(cut.text)
    if not isinstance(value, dict):
        raise InvalidJson("The body must be a JSON object")
    fields = cast("JsonObject", value)
    _Check(body, cut, max_url_bytes).check_object(fields, 0)
    return fields


def check_text(size_bytes: int, num_url_chars: int) -> None:
    """Refuses what hid its text among the pictures, by beginning it as one.

    Args:
        size_bytes: of the whole body.
        num_url_chars: of the URLs of its image parts, decoded; JSON may need twelve bytes for ten
            of them, and so the bound is a wide one.

    Raises:
        RequestTooLarge: its text is too long.
    """
    if size_bytes - num_url_chars > 2 * MAX_TEXT_BYTES:
        raise _too_much_text()


def _too_much_text() -> RequestTooLarge:
    return RequestTooLarge(
        f"The body without its pictures is larger than {MAX_TEXT_BYTES} bytes; send less text"
    )


def _decode(text: bytes | bytearray | memoryview) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidJson(
            "The body is not valid JSON; check quotes, commas and encoding"
        ) from error


@dataclass(frozen=True, slots=True)
class _Check:
    """Walks over decoded values, and puts what was cut out back in its place."""

    body: bytes | bytearray
    cut: CutText
    max_url_bytes: int

    def check_object(self, fields: JsonObject, depth: int) -> None:
        for key, item in fields.items():
            if self._check(key, depth + 1) is not key:
                raise InvalidJson("The body has a field with a picture for a name")
            found = self._check(item, depth + 1)
            if found is not item:
                # The key is there: the size does not change while we look.
                fields[key] = found

    def _check(self, value: object, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise InvalidJson(f"The body nests deeper than {MAX_DEPTH} levels")
        if isinstance(value, str):
            return self._check_string(value)
        if isinstance(value, float):
            if not math.isfinite(value):
                raise InvalidJson("The body has a number that is not finite")
        elif isinstance(value, dict):
            # Decoded JSON has no other shape than this.
            self.check_object(cast("JsonObject", value), depth)
        elif isinstance(value, list):
            items = cast("list[object]", value)
            for place, item in enumerate(items):
                found = self._check(item, depth + 1)
                if found is not item:
                    items[place] = found
        return value

    def _check_string(self, value: str) -> str:
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise InvalidJson(
                    "The body has a string with a lone surrogate (\\ud800 to \\udfff)"
                ) from error
        elif self.cut.spans and value.startswith(self.cut.prefix):
            return self._put_back(value)
        return value

    def _put_back(self, name: str) -> str:
        start, end = self.cut.spans[name]
        if end - start > self.max_url_bytes:
            raise ImageFileTooLarge(f"A data URL may have at most {self.max_url_bytes} bytes")
        with memoryview(self.body) as whole, whole[start:end] as span:
            text = _decode(span)
        assert isinstance(text, str), "what was cut out begins and ends with a quote"
        return self._check_string(text)
