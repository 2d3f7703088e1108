"""Tier L2: byte patches by feature key, in this process and in the shared store.

Patches are kept as bytes, a quarter of the floats that the encoder takes. In the shared store an
image is cut into pieces of one window each; a piece ends with the CRC-32 of its bytes, and one that
is missing, of another length or damaged makes the whole image a miss.
"""

import asyncio
import logging
import zlib
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from k3_preprocessor.windows import Windows, run_to_end
from k3core.transfer.base import ObjectStore, Region
from k3wire.blobs.byte_lru import ByteLru

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

CHECKSUM_BYTES = 4
MAX_PENDING = 8
"""Images that wait to be shared; beyond that one is simply not shared."""


@dataclass(frozen=True, slots=True)
class Patches:
    """Byte patches of one image.

    Attributes:
        pixels: [N, 3, P, P], uint8.
    """

    pixels: Bytes


class PatchTier:
    """Both levels of the tier."""

    def __init__(self, capacity_bytes: int, windows: Windows, store: ObjectStore | None) -> None:
        """Starts empty.

        Args:
            capacity_bytes: bound of the level in this process.
            windows: registered with the store.
            store: the shared level, None where there is none.
        """
        self._local: ByteLru[bytes, Patches] = ByteLru(capacity_bytes, lambda p: p.pixels.nbytes)
        self._windows = windows
        self._store = store
        self._pending: asyncio.Queue[tuple[bytes, Bytes]] = asyncio.Queue(MAX_PENDING)

    @property
    def size_bytes(self) -> int:
        """Bytes held in this process."""
        return self._local.size_bytes

    def find_local(self, feature_key: bytes) -> Patches | None:
        """Looks in this process."""
        return self._local.get(feature_key)

    async def find_shared(self, feature_key: bytes, shape: tuple[int, ...]) -> Patches | None:
        """Looks in the shared store, and keeps what it finds.

        Args:
            feature_key: of the image.
            shape: that its patches have.
        """
        if self._store is None:
            return None
        pixels = np.empty(shape, dtype=np.uint8)
        flat = pixels.reshape(-1)
        for index, piece in enumerate(self._cut(flat)):
            if not await self._get(self._store, _object_key(feature_key, index), piece):
                return None
        patches = Patches(pixels)
        self._local.put(feature_key, patches)
        return patches

    def keep(self, feature_key: bytes, patches: Patches) -> None:
        """Keeps new patches here, and shares them when there is time."""
        self._local.put(feature_key, patches)
        if self._store is None:
            return
        try:
            self._pending.put_nowait((feature_key, patches.pixels))
        except asyncio.QueueFull:
            logger.info("patches not shared, the store is behind")

    async def share(self) -> None:
        """Writes to the shared store what `keep` left; runs until it is cancelled."""
        while self._store is not None:
            feature_key, pixels = await self._pending.get()
            for index, piece in enumerate(self._cut(pixels.reshape(-1))):
                await self._put(self._store, _object_key(feature_key, index), piece)
            self._pending.task_done()

    async def settle(self) -> None:
        """Returns when everything that waits has been offered to the store."""
        await self._pending.join()

    def _cut(self, flat: Bytes) -> list[Bytes]:
        piece_bytes = self._windows.window_bytes - CHECKSUM_BYTES
        return [flat[at : at + piece_bytes] for at in range(0, flat.size, piece_bytes)]

    async def _get(self, store: ObjectStore, key: str, piece: Bytes) -> bool:
        size = piece.size + CHECKSUM_BYTES
        async with self._windows.take() as window:
            (found,) = await store.get([(key, Region(window.address, size))])
            if not found:
                return False
            return await run_to_end(partial(_unpack, window.view[:size], piece))

    async def _put(self, store: ObjectStore, key: str, piece: Bytes) -> None:
        size = piece.size + CHECKSUM_BYTES
        async with self._windows.take() as window:
            await run_to_end(partial(_pack, piece, window.view[:size]))
            await store.put([(key, Region(window.address, size))])


def _object_key(feature_key: bytes, index: int) -> str:
    return f"l2:{feature_key.hex()}:{index}"


def _pack(piece: Bytes, target: Bytes) -> None:
    target[: piece.size] = piece
    checksum = zlib.crc32(piece.data)
    target[piece.size :] = np.frombuffer(checksum.to_bytes(CHECKSUM_BYTES, "big"), dtype=np.uint8)


def _unpack(source: Bytes, piece: Bytes) -> bool:
    checksum = int.from_bytes(source[piece.size :].tobytes(), "big")
    piece[:] = source[: piece.size]
    return zlib.crc32(piece.data) == checksum
