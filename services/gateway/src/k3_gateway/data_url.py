"""Data URLs: the RFC 2397 form with base64, leniently spaced, strictly decoded.

Taken: any case of `data:`, charset and other parameters, white space and line breaks in the
payload, missing padding, percent-encoding. Refused: everything else, bare base64 and local paths
above all. The declared type is not believed; the bytes are sniffed later.
"""

import base64
import binascii
from urllib.parse import unquote_to_bytes

from k3wire.errors import EmptyImageFile, ImageFileTooLarge, InvalidBase64Image

_WHITE_SPACE = b" \t\r\n\f\v"
MAX_HEADER_CHARS = 256
"""Longest media type with parameters before the comma."""


MAX_OTHER_ESCAPES = 10_000
_USUAL_ESCAPES = tuple(
    (escape, char)
    for char, code in (
        (b"+", b"%2B"),
        (b"/", b"%2F"),
        (b"=", b"%3D"),
        (b"\n", b"%0A"),
        (b"\r", b"%0D"),
        (b" ", b"%20"),
    )
    for escape in (code, code.lower())
)


def is_data_url(url: str) -> bool:
    """Says whether a URL carries its own bytes."""
    return url.lstrip()[:5].lower() == "data:"


def decode_data_url(url: str, max_bytes: int, param: str) -> bytes:
    """Gives the bytes of a data URL.

    Args:
        url: for which `is_data_url` holds.
        max_bytes: longest accepted result.
        param: the part's path in the request, for errors.

    Raises:
        InvalidBase64Image: not base64, or not declared as such.
        EmptyImageFile: no payload.
        ImageFileTooLarge: over `max_bytes`.
    """
    text = url.strip()
    comma = text.find(",", 5, 5 + MAX_HEADER_CHARS)
    parameters = text[5:comma].lower().replace(" ", "").split(";")
    if comma < 0 or "base64" not in parameters[1:]:
        raise InvalidBase64Image(
            "Write image data as 'data:image/png;base64,' and the base64 text", param=param
        )
    payload = text[comma + 1 :]
    if len(payload) > 2 * max_bytes + 1024:
        raise _too_large(max_bytes, param)
    raw = _unquoted(payload.encode("utf-8", "replace"), param)
    raw = raw.translate(None, _WHITE_SPACE).rstrip(b"=")
    if not raw:
        raise EmptyImageFile("The image has no bytes", param=param)
    try:
        data = base64.b64decode(raw + b"=" * (-len(raw) % 4), validate=True)
    except binascii.Error as error:
        raise InvalidBase64Image("The image's base64 text does not decode", param=param) from error
    if len(data) > max_bytes:
        raise _too_large(max_bytes, param)
    return data


def _unquoted(payload: bytes, param: str) -> bytes:
    """Undoes percent escapes; those that base64 needs at the speed of a copy, few others.

    The general decoder takes hundreds of bytes and half a microsecond an escape, on the loop.
    """
    if b"%" not in payload:
        return payload
    for escape, char in _USUAL_ESCAPES:
        payload = payload.replace(escape, char)
    if payload.count(b"%") > MAX_OTHER_ESCAPES:
        raise InvalidBase64Image(
            "Write the image's base64 text without percent escapes of letters and digits",
            param=param,
        )
    return unquote_to_bytes(payload)


def _too_large(max_bytes: int, param: str) -> ImageFileTooLarge:
    return ImageFileTooLarge(f"An image may have at most {max_bytes} encoded bytes", param=param)
