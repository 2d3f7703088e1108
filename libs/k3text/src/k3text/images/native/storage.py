"""Where Pillow keeps the pixels of a picture, so that they are read in place instead of copied out.

Source: Arrow C data interface, struct ArrowArray, and its PyCapsule names; Pillow exports an RGB
picture as one array of lists of four bytes, the fourth of which is padding.
"""

import ctypes
from dataclasses import dataclass
from typing import ClassVar

from PIL import Image

PIXEL_BYTES = 4

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)


class _ArrowArray(ctypes.Structure):
    _fields_: ClassVar = [
        ("length", ctypes.c_int64),
        ("null_count", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("n_buffers", ctypes.c_int64),
        ("n_children", ctypes.c_int64),
        ("buffers", ctypes.POINTER(ctypes.c_void_p)),
        ("children", ctypes.POINTER(ctypes.c_void_p)),
        ("dictionary", ctypes.c_void_p),
        ("release", ctypes.c_void_p),
        ("private_data", ctypes.c_void_p),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Pixels:
    """A picture's bytes, [height, width, 4].

    Attributes:
        address: of the first byte.
        width: in pixels.
        height: likewise.
        owner: keeps the bytes alive.
    """

    address: int
    width: int
    height: int
    owner: object


def pixels_in_place(picture: Image.Image) -> Pixels | None:
    """Gives the bytes of an RGB picture where they lie, or None where they are in several pieces.

    Args:
        picture: at least one pixel; not to be changed while the bytes are read.
    """
    assert picture.mode == "RGB", "other modes have other pixels"
    try:
        _, capsule = picture.__arrow_c_array__()
    except ValueError:
        # Pillow cuts its memory into blocks of 16 MiB.
        return None
    array = _ArrowArray.from_address(_address(_pointer_of(capsule, b"arrow_array")))
    values = _ArrowArray.from_address(_address(array.children[0]))
    num_pixels = picture.width * picture.height
    assert (array.length, array.offset) == (num_pixels, 0), "one list a pixel"
    assert (values.length, values.offset) == (num_pixels * PIXEL_BYTES, 0), "four bytes a list"
    return Pixels(_address(values.buffers[1]), picture.width, picture.height, capsule)


def _address(found: int | None) -> int:
    assert found is not None, "Arrow's arrays have their parts"
    return found
