"""Header of AVIF: the primary item's size and its turns.

Source: ISO/IEC 14496-12 (boxes, `meta`, `pitm`, `iprp`, `ipma`) and 23008-12 (`ispe`, `irot`,
`imir`); a turn is applied before a mirror.
"""

import struct
from collections.abc import Iterator

from k3text.images.formats.stored import Stored
from k3wire.errors import ImageParseError

MAX_BOXES = 4096
_BRANDS = (b"avif", b"avis")

_ORIENTATIONS: dict[tuple[int, int | None], int] = {
    # (quarter turns anticlockwise, mirror axis) -> EXIF orientation
    (0, None): 1, (1, None): 8, (2, None): 3, (3, None): 6,
    (0, 0): 4, (1, 0): 5, (2, 0): 2, (3, 0): 7,
    (0, 1): 2, (1, 1): 7, (2, 1): 4, (3, 1): 5,
}  # fmt: skip


def is_avif(data: bytes) -> bool:
    """Says whether the file's major or compatible brands are AVIF's."""
    if data[4:8] != b"ftyp":
        return False
    (length,) = struct.unpack_from(">I", data)
    brands = data[8 : min(length, 256)]
    return any(brands[at : at + 4] in _BRANDS for at in range(0, len(brands), 4))


def read_avif(data: bytes) -> Stored:
    """Reads size and orientation of the primary item; frames are not counted.

    Raises:
        ImageParseError: the boxes do not lead to a size.
        struct.error: the data end too early.
    """
    meta = _find(data, b"meta", 0, len(data))
    inner = _boxes(data, meta[0] + 4, meta[1])
    places = {kind: (start, end) for kind, start, end in inner}
    if b"pitm" not in places or b"iprp" not in places:
        raise ImageParseError("The AVIF has no picture")
    primary = _read_primary(data, *places[b"pitm"])
    start, end = places[b"iprp"]
    properties = list(_boxes(data, *_find(data, b"ipco", start, end)))
    width = height = turns = 0
    mirror: int | None = None
    for index in _read_associations(data, *_find(data, b"ipma", start, end), primary):
        if not 1 <= index <= len(properties):
            continue
        kind, at, _ = properties[index - 1]
        if kind == b"ispe":
            width, height = struct.unpack_from(">II", data, at + 4)
        elif kind == b"irot":
            turns = data[at] & 3
        elif kind == b"imir":
            mirror = data[at] & 1
    return Stored(width, height, _ORIENTATIONS[turns, mirror])


def _boxes(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Walks the boxes of a range: kind, first byte of the body, end."""
    for _ in range(MAX_BOXES):
        if start + 8 > end:
            return
        length, kind = struct.unpack_from(">I4s", data, start)
        body = start + 8
        if length == 1:
            (length,) = struct.unpack_from(">Q", data, body)
            body += 8
        stop = end if length == 0 else start + length
        if stop < body or stop > end:
            raise ImageParseError("The AVIF ends before its picture")
        yield kind, body, stop
        start = stop
    raise ImageParseError("The AVIF has too many boxes")


def _find(data: bytes, wanted: bytes, start: int, end: int) -> tuple[int, int]:
    for kind, body, stop in _boxes(data, start, end):
        if kind == wanted:
            return body, stop
    raise ImageParseError("The AVIF has no picture")


def _read_primary(data: bytes, start: int, _: int) -> int:
    return struct.unpack_from(">H" if data[start] == 0 else ">I", data, start + 4)[0]


def _read_associations(data: bytes, start: int, _: int, item: int) -> list[int]:
    """Gives the property indices of one item, counted from 1."""
    version, is_wide = data[start], bool(data[start + 3] & 1)
    (num_items,) = struct.unpack_from(">I", data, start + 4)
    at = start + 8
    for _index in range(min(num_items, MAX_BOXES)):
        (found,) = struct.unpack_from(">H" if version == 0 else ">I", data, at)
        at += 2 if version == 0 else 4
        (count,) = struct.unpack_from(">B", data, at)
        at += 1
        form, size, mask = ("H", 2, 0x7FFF) if is_wide else ("B", 1, 0x7F)
        if found == item:
            return [value & mask for value in struct.unpack_from(f">{count}{form}", data, at)]
        at += count * size
    return []
