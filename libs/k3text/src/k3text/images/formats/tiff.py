"""Header of TIFF, first page. Source: TIFF 6.0, section 2 and page 36 (orientation)."""

import struct

from k3text.images.formats.stored import MAX_FRAMES, Stored
from k3wire.errors import ImageParseError

SIGNATURES = (b"II*\0", b"MM\0*")
MAX_ENTRIES = 4096

_WIDTH, _HEIGHT, _ORIENTATION = 256, 257, 274
_SHORT, _LONG = 3, 4


def read_tiff(data: bytes) -> Stored:
    """Reads size and orientation of the first page, and counts pages.

    Raises:
        ImageParseError: the first page has no size.
        struct.error: the data end too early.
    """
    order = "<" if data[:2] == b"II" else ">"
    (offset,) = struct.unpack_from(f"{order}I", data, 4)
    values, following = _read_page(data, order, offset)
    if _WIDTH not in values or _HEIGHT not in values:
        raise ImageParseError("The TIFF's first page has no size")
    orientation = values.get(_ORIENTATION, 1)
    return Stored(
        values[_WIDTH],
        values[_HEIGHT],
        orientation if 1 <= orientation <= 8 else 1,
        _count_pages(data, order, offset, following),
    )


def _read_page(data: bytes, order: str, offset: int) -> tuple[dict[int, int], int]:
    """Gives the single whole numbers of a page by tag, and where the next page begins."""
    (num_entries,) = struct.unpack_from(f"{order}H", data, offset)
    if num_entries > MAX_ENTRIES:
        raise ImageParseError("The TIFF's first page has too many entries")
    values: dict[int, int] = {}
    for index in range(num_entries):
        at = offset + 2 + 12 * index
        tag, kind, count = struct.unpack_from(f"{order}HHI", data, at)
        form = {_SHORT: "H", _LONG: "I"}.get(kind)
        if form is not None and count == 1:
            (values[tag],) = struct.unpack_from(order + form, data, at + 8)
    (following,) = struct.unpack_from(f"{order}I", data, offset + 2 + 12 * num_entries)
    return values, following


def _count_pages(data: bytes, order: str, first: int, following: int) -> int:
    seen = {first}
    while following and following not in seen and len(seen) < MAX_FRAMES:
        seen.add(following)
        try:
            (num_entries,) = struct.unpack_from(f"{order}H", data, following)
            (following,) = struct.unpack_from(f"{order}I", data, following + 2 + 12 * num_entries)
        except struct.error:
            break
    return len(seen)
