"""Request bodies: read under a limit, decoded strictly.

Nothing is trusted: the media type, the length the client claims, depth, surrogates. A body over
the limit is refused while it is read, before it fills memory.
"""

import math
import re
from collections.abc import AsyncIterator, Mapping

import msgspec

from k3_gateway.chat_request.fields import JsonObject
from k3wire.errors import InvalidJson, RequestTooLarge, UnsupportedMediaType

MAX_DEPTH = 64
"""Deepest nesting of arrays and objects; real requests stay under 20."""

_SURROGATE = re.compile("[\ud800-\udfff]")


def check_headers(headers: Mapping[str, str], max_bytes: int) -> None:
    """Refuses a body by its headers alone.

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
        return
    if not length.isdigit():
        raise InvalidJson("Content-Length must be a whole number")
    if int(length) > max_bytes:
        raise too_large(max_bytes)


def too_large(max_bytes: int) -> RequestTooLarge:
    """The error for a body over the limit."""
    return RequestTooLarge(
        f"The body is larger than {max_bytes} bytes; send less or smaller images"
    )


async def read_body(chunks: AsyncIterator[bytes], max_bytes: int) -> bytes:
    """Collects a body, counting while it comes in.

    Raises:
        RequestTooLarge: past the limit.
    """
    parts: list[bytes] = []
    size_bytes = 0
    async for chunk in chunks:
        size_bytes += len(chunk)
        if size_bytes > max_bytes:
            raise too_large(max_bytes)
        parts.append(chunk)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def decode_object(body: bytes) -> JsonObject:
    """Decodes a JSON object.

    Raises:
        InvalidJson: not JSON, not an object, too deep, or with lone surrogates.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidJson(
            "The body is not valid JSON; check quotes, commas and encoding"
        ) from error
    if not isinstance(value, dict):
        raise InvalidJson("The body must be a JSON object")
    _check_value(value, 0)
    return value


def _check_value(value: object, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise InvalidJson(f"The body nests deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        if not value.isascii() and _SURROGATE.search(value):
            raise InvalidJson("The body has a string with a lone surrogate (\\ud800 to \\udfff)")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidJson("The body has a number that is not finite")
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_value(key, depth + 1)
            _check_value(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_value(item, depth + 1)
