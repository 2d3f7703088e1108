"""Patches into the encoder's memory: byte patches become floats, window by window, and are written.

A write that was begun is waited for even when the request is cancelled, so that a window is never
refilled under it.
"""

import zlib
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from k3_preprocessor.windows import Window, Windows, run_to_end
from k3core.transfer.base import TransferEngine, Write
from k3text.images.config import ProcessorConfig
from k3text.images.patchify import normalise
from k3wire.messages.base import BufferSpan

FLOAT_BYTES = 4


def float_bytes(shape: tuple[int, ...]) -> int:
    """Gives the length of float32 patches of a shape."""
    return int(np.prod(shape)) * FLOAT_BYTES


@dataclass(frozen=True, slots=True)
class Delivery:
    """Writes patches out.

    Attributes:
        engine: with the windows registered.
        windows: what patches leave through.
        config: for the floats.
    """

    engine: TransferEngine
    windows: Windows
    config: ProcessorConfig

    async def deliver(self, pixels: npt.NDArray[np.uint8], destination: BufferSpan) -> int:
        """Writes an image's patches as float32.

        Args:
            pixels: [N, 3, P, P], uint8.
            destination: at least as long as the floats.

        Returns:
            CRC-32 of what was written.

        Raises:
            TierUnavailable: the encoder is gone or did not take them.
        """
        patch_bytes = float_bytes(pixels.shape[1:])
        step = self.windows.window_bytes // patch_bytes
        assert step > 0, "a window holds a patch"
        checksum = 0
        async with self.windows.take() as window:
            for start in range(0, pixels.shape[0], step):
                piece = pixels[start : start + step]
                checksum = await run_to_end(partial(self._fill, piece, window, checksum))
                write = Write(
                    window.address,
                    destination.address + start * patch_bytes,
                    piece.shape[0] * patch_bytes,
                )
                await self.engine.write(destination.session, [write])
        return checksum

    def _fill(self, piece: npt.NDArray[np.uint8], window: Window, checksum: int) -> int:
        out = window.view[: piece.size * FLOAT_BYTES].view(np.float32).reshape(piece.shape)
        normalise(piece, self.config, out)
        return zlib.crc32(out.data, checksum)
