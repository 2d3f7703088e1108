"""The compiled steps as functions on NumPy arrays; they release the interpreter lock while they run.

Nothing here decides pixels: for every input the result is that of `k3text.images.numpy_steps` and of
Pillow's resize, which run where there is no compiler.
"""

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from k3text.images.native.build import NativeUnavailableError, build, folders
from k3text.images.native.storage import PIXEL_BYTES, Pixels
from k3text.images.resampling import Taps

logger = logging.getLogger(__name__)

CHANNELS = 3
TURNED_ROWS = 16
"""TILE of resize.c, for which its caller has the memory."""

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class NativeSteps:
    """Entry points of the shared object, of which the arguments are addresses and lengths."""

    cut_entry: Callable[..., None]
    weigh_rows_entry: Callable[..., None]
    weigh_columns_entry: Callable[..., None]
    look_up_entry: Callable[..., None]
    scale_entry: Callable[..., None]

    def cut(self, pixels: Pixels, out: Bytes) -> None:
        """Cuts a picture, or a band of one, into patches.

        Args:
            pixels: of the picture.
            out: [rows, columns, 3, P, P], C-contiguous; wholly written, zero where the picture does
                not reach.
        """
        rows, columns, _, patch, _ = out.shape
        assert out.flags.c_contiguous, "patches are written one after the other"
        assert pixels.width <= columns * patch, "the picture fits its patches"
        assert pixels.height <= rows * patch, "the picture fits its patches"
        scratch = np.empty(CHANNELS * columns * patch, dtype=np.uint8)
        self.cut_entry(
            pixels.address, pixels.width, pixels.height, patch, rows, columns,
            scratch.ctypes.data, out.ctypes.data,
        )  # fmt: skip

    def resize(self, pixels: Pixels, columns: Taps, rows: Taps, is_rows_first: bool) -> Pixels:
        """Resizes a picture, or a band of one, as Pillow does, into new memory.

        Args:
            pixels: of the source.
            columns: of the result, from the source's.
            rows: likewise.
            is_rows_first: whether the picture becomes lower before it becomes narrower.
        """
        if is_rows_first:
            return self._weigh_columns(self._weigh_rows(pixels, rows), columns)
        return self._weigh_rows(self._weigh_columns(pixels, columns), rows)

    def _weigh_rows(self, pixels: Pixels, rows: Taps) -> Pixels:
        height, num_taps = rows.weights.shape
        assert int(rows.starts[-1]) + num_taps <= pixels.height, "taps lie within the picture"
        out = np.empty((height, pixels.width, PIXEL_BYTES), dtype=np.uint8)
        self.weigh_rows_entry(
            pixels.address, pixels.width * PIXEL_BYTES, rows.starts.ctypes.data,
            rows.weights.ctypes.data, height, num_taps, out.ctypes.data,
        )  # fmt: skip
        return Pixels(out.ctypes.data, pixels.width, height, out)

    def _weigh_columns(self, pixels: Pixels, columns: Taps) -> Pixels:
        width, num_taps = columns.weights.shape
        assert int(columns.starts[-1]) + num_taps <= pixels.width, "taps lie within the picture"
        out = np.empty((pixels.height, width, PIXEL_BYTES), dtype=np.uint8)
        scratch = np.empty(TURNED_ROWS * (pixels.width + width) * PIXEL_BYTES, dtype=np.uint8)
        self.weigh_columns_entry(
            pixels.address, pixels.width, pixels.height, columns.starts.ctypes.data,
            columns.weights.ctypes.data, width, num_taps, scratch.ctypes.data, out.ctypes.data,
        )  # fmt: skip
        return Pixels(out.ctypes.data, width, pixels.height, out)

    def look_up(self, pixels_NCPP: Bytes, tables: Floats, out: Floats) -> None:  # noqa: N803
        """Writes the float of every byte.

        Args:
            pixels_NCPP: [N, 3, P, P], uint8, C-contiguous.
            tables: [3, 256], float32: the float of every byte, a channel.
            out: [N, 3, P, P], float32, C-contiguous.
        """
        num_patches, _, height, width = pixels_NCPP.shape
        assert pixels_NCPP.flags.c_contiguous, "bytes are read one after the other"
        assert out.flags.c_contiguous, "floats are written one after the other"
        assert out.shape == pixels_NCPP.shape, "a float for every byte"
        assert tables.shape == (CHANNELS, 256), "a table for every channel"
        scale = _scale_of(tables.tobytes())
        entry, constants = self.look_up_entry, (tables,)
        if scale is not None:
            entry, constants = self.scale_entry, scale
        addresses = [values.ctypes.data for values in (*constants, out)]
        entry(pixels_NCPP.ctypes.data, num_patches, height * width, *addresses)


@lru_cache(maxsize=8)
def _scale_of(tables: bytes) -> tuple[Floats, Floats] | None:
    """Gives divisors and shifts that make every float of the tables bit for bit, if there are such.

    A processor divides several bytes at once but looks up one; K3's tables have a scale.
    """
    floats = np.frombuffer(tables, dtype=np.float32).reshape(CHANNELS, 256)
    shifts = -floats[:, 0]
    with np.errstate(all="ignore"):
        divisors = (255 / (floats[:, 255].astype(np.float64) + shifts)).astype(np.float32)
        found = np.arange(256, dtype=np.float32) / divisors[:, None] - shifts[:, None]
    return (divisors, shifts) if found.tobytes() == tables else None


def load(library: Path) -> NativeSteps:
    """Loads the compiled steps.

    Raises:
        NativeUnavailableError: the file cannot be loaded here.
    """
    try:
        handle = ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeUnavailableError(f"compiled code does not load: {error}") from error
    address, length = ctypes.c_void_p, ctypes.c_ssize_t
    handle.k3_cut.argtypes = (address, *([length] * 5), address, address)
    handle.k3_cut.restype = None
    handle.k3_weigh_rows.argtypes = (address, length, *([address] * 2), length, length, address)
    handle.k3_weigh_rows.restype = None
    handle.k3_weigh_columns.argtypes = (
        address, *([length] * 2), *([address] * 2), *([length] * 2), address, address
    )  # fmt: skip
    handle.k3_weigh_columns.restype = None
    handle.k3_look_up.argtypes = (address, length, length, address, address)
    handle.k3_look_up.restype = None
    handle.k3_scale.argtypes = (address, length, length, address, address, address)
    handle.k3_scale.restype = None
    return NativeSteps(
        handle.k3_cut,
        handle.k3_weigh_rows,
        handle.k3_weigh_columns,
        handle.k3_look_up,
        handle.k3_scale,
    )


@lru_cache(maxsize=1)
def native_steps() -> NativeSteps | None:
    """Gives the compiled steps, compiling them if need be, or None where they cannot be had.

    The first call may block for a second; it belongs into a start.
    """
    try:
        return load(build(folders()))
    except NativeUnavailableError as error:
        logger.warning("images are cut without compiled code", extra={"reason": str(error)})
        return None
