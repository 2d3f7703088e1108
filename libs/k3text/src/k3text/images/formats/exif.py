"""The one thing that is read of EXIF: which way up the picture is.

Source: Exif 2.32 (CIPA DC-008), section 4.6.4 A, tag 274; TIFF 6.0, section 2.
"""

import struct

PREFIX = b"Exif\0\0"
ORIENTATION_TAG = 0x0112
MAX_ENTRIES = 4096

_SHORT = 3
_LONG = 4


def orientation_of(exif: bytes | memoryview) -> int:
    """Reads the orientation, 1 to 8; 1 where it is missing or the block is damaged.

    A damaged block is no error: cameras and editors write many, and the picture is whole.
    """
    block = bytes(exif)
    while block.startswith(PREFIX):
        block = block[len(PREFIX) :]
    order = {b"II": "<", b"MM": ">"}.get(block[:2])
    if order is None:
        return 1
    try:
        _, offset = struct.unpack_from(f"{order}HI", block, 2)
        (num_entries,) = struct.unpack_from(f"{order}H", block, offset)
        for index in range(min(num_entries, MAX_ENTRIES)):
            at = offset + 2 + 12 * index
            tag, kind = struct.unpack_from(f"{order}HH", block, at)
            if tag == ORIENTATION_TAG:
                form = {_SHORT: "H", _LONG: "I"}.get(kind)
                if form is None:
                    return 1
                (value,) = struct.unpack_from(order + form, block, at + 8)
                return value if 1 <= value <= 8 else 1
    except struct.error:
        return 1
    return 1
