"""Data URLs: the RFC 2397 form with base64, leniently spaced, strictly decoded.

Taken: any case of `data:`, charset and other parameters, white space and line breaks in the
payload, missing padding, percent-encoding. Refused: everything else, bare base64 and local paths
above all. The declared type is not believed; the bytes are sniffed later.
"""

import binascii
from urllib.parse import unquote_to_bytes

from k3wire.errors import EmptyImageFile, ImageFileTooLarge, InvalidBase64Image

_WHITE_SPACE = b" \t\r\n\f\v"
MAX_HEADER_CHARS = 256
"""Longest media type with parameters before the comma."""


SLICE_CHARS = 256 * 1024
"""What is decoded at a time: a millisecond or two in which no other thread runs."""

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
    # Without a comma there is no header, however long the text is.
    parameters = text[5 : max(comma, 5)].lower().replace(" ", "").split(";")
    if "base64" not in parameters[1:]:
        raise InvalidBase64Image(
            "Write image data as 'data:image/png;base64,' and the base64 text", param=param
        )
    if len(text) - comma > max_payload_chars(max_bytes):
        raise _too_large(max_bytes, param)
    decoder = _Decoder(param)
    for start in range(comma + 1, len(text), SLICE_CHARS):
        decoder.feed(text[start : start + SLICE_CHARS].encode("utf-8", "replace"))
        if decoder.size_bytes > max_bytes:
            raise _too_large(max_bytes, param)
    data = decoder.end()
    if len(data) > max_bytes:
        raise _too_large(max_bytes, param)
    return data


def max_payload_chars(max_bytes: int) -> int:
    """Longest payload that may decode to `max_bytes`, with some line breaks and escapes."""
    return 2 * max_bytes + 1024


class _Decoder:
    """One payload, slice by slice.

    Attributes:
        size_bytes: decoded so far.
    """

    def __init__(self, param: str) -> None:
        self.size_bytes = 0
        self._param = param
        self._pieces: list[bytes] = []
        self._rest = b""
        self._escape = b""
        self._is_padded = False
        self._num_escapes = 0

    def feed(self, payload: bytes) -> None:
        """Takes the next slice, wherever it is cut."""
        raw = self._unquoted(self._escape + payload).translate(None, _WHITE_SPACE)
        text, _, padding = raw.partition(b"=")
        if padding.strip(b"=") or (self._is_padded and text):
            raise self._no_base64()
        self._is_padded = self._is_padded or len(text) < len(raw)
        text = self._rest + text
        num_whole = len(text) - len(text) % 4
        self._rest = text[num_whole:]
        self._decode(text[:num_whole])

    def end(self) -> bytes:
        """Gives what was decoded.

        Raises:
            EmptyImageFile: nothing was.
        """
        if self._escape:
            raise self._no_base64()
        self._decode(self._rest + b"=" * (-len(self._rest) % 4))
        if not self.size_bytes:
            raise EmptyImageFile("The image has no bytes", param=self._param)
        return b"".join(self._pieces)

    def _decode(self, text: bytes) -> None:
        try:
            data = binascii.a2b_base64(text, strict_mode=True)
        except binascii.Error as error:
            raise self._no_base64() from error
        self._pieces.append(data)
        self.size_bytes += len(data)

    def _unquoted(self, payload: bytes) -> bytes:
        """Undoes percent escapes; those that base64 needs at the speed of a copy, few others.

        The general decoder takes hundreds of bytes and half a microsecond an escape.
        """
        self._escape = b""
        if b"%" not in payload:
            return payload
        cut = payload.rfind(b"%", -2)
        if cut >= 0:
            payload, self._escape = payload[:cut], payload[cut:]
        for escape, char in _USUAL_ESCAPES:
            payload = payload.replace(escape, char)
        self._num_escapes += payload.count(b"%")
        if self._num_escapes > MAX_OTHER_ESCAPES:
            raise InvalidBase64Image(
                "Write the image's base64 text without percent escapes of letters and digits",
                param=self._param,
            )
        return unquote_to_bytes(payload)

    def _no_base64(self) -> InvalidBase64Image:
        return InvalidBase64Image("The image's base64 text does not decode", param=self._param)


def _too_large(max_bytes: int, param: str) -> ImageFileTooLarge:
    return ImageFileTooLarge(f"An image may have at most {max_bytes} encoded bytes", param=param)
