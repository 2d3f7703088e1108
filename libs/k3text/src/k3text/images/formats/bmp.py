"""Header of BMP. Source: Microsoft's description of BITMAPFILEHEADER and BITMAPINFOHEADER."""

import struct

from k3text.images.formats.stored import Stored

SIGNATURE = b"BM"
_OLD_HEADER_BYTES = 12


def read_bmp(data: bytes) -> Stored:
    """Reads the size; a negative height only says that rows go downwards.

    Raises:
        struct.error: the data end too early.
    """
    (header_bytes,) = struct.unpack_from("<I", data, 14)
    form = "<HH" if header_bytes == _OLD_HEADER_BYTES else "<ii"
    width, height = struct.unpack_from(form, data, 18)
    return Stored(width, abs(height))
