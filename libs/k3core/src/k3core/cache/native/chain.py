"""A run of chained digests in one call into compiled C, without the interpreter's lock.

The sources lie beside this file. They are compiled at the first start on a machine, in about a
second, by the kernels' builder and into its folder. The digests are those of `hashlib`, bit for bit,
which is what hashes where there is no compiler or the processor has no SHA instructions that are
known here: there it is OpenSSL's code that is the fastest, in spite of two calls a unit.
"""

import ctypes
import logging
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from struct import iter_unpack
from typing import TypeAlias

from k3core.kernels.errors import BackendUnavailableError
from k3core.kernels.native.build import (
    build_library,
    cache_dirs,
    find_toolchain,
    usable_cache_dir,
)

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent / "src"
# DIGEST_BYTES of chain.c.
WRITTEN_BYTES = 16

# A C entry point: ctypes gives no better type for what it makes at run time.
Function: TypeAlias = Callable[..., None]


@dataclass(frozen=True, slots=True)
class NativeChain:
    """The entry point, as `chain.c` describes it."""

    entry: Function

    def append_run(
        self,
        digests: list[bytes],
        parent: bytes,
        units: memoryview,
        num_seen: int,
        borders: tuple[int, int, int],
    ) -> None:
        """Append the digests of a run of units, except for the first `num_seen`, which are there.

        Args:
            digests: extended in place.
            parent: digest before the first unit.
            units: the bytes of whole units, writable (it is not written); read in place.
            num_seen: units in front that count as hashed already, all in the first group.
            borders: bytes of a unit, units until the first group ends, units of a later group.
        """
        unit_bytes, until_border, group_units = borders
        num_units = len(units) // unit_bytes
        assert len(parent) == WRITTEN_BYTES, "a digest is what a run follows"
        assert num_seen < min(until_border, num_units), "a group is begun whole"
        written = bytearray(WRITTEN_BYTES * (num_units - num_seen))
        first, out = ctypes.c_char.from_buffer(units), ctypes.c_char.from_buffer(written)
        self.entry(
            parent, ctypes.byref(first), unit_bytes, num_units, num_seen, until_border, group_units,
            ctypes.byref(out),
        )  # fmt: skip
        digests.extend(chain.from_iterable(iter_unpack(f"{WRITTEN_BYTES}s", written)))


def load_chain(path: Path) -> NativeChain:
    """Load a compiled library.

    Raises:
        BackendUnavailableError: the file cannot be loaded here, or the processor lacks the
            instructions.
    """
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendUnavailableError(f"compiled hashing does not load: {error}") from error
    handle.k3_can_chain.argtypes = ()
    handle.k3_can_chain.restype = ctypes.c_int
    if not handle.k3_can_chain():
        raise BackendUnavailableError(f"no SHA instructions that are known ({platform.machine()})")
    handle.k3_chain_digests.argtypes = (
        ctypes.c_char_p,
        ctypes.c_void_p,
        *[ctypes.c_int64] * 5,
        ctypes.c_void_p,
    )
    handle.k3_chain_digests.restype = None
    return NativeChain(handle.k3_chain_digests)


@lru_cache(maxsize=1)
def native_chain() -> NativeChain | None:
    """The compiled chain of this process, None where it cannot be had, which is warned about.

    The first call may block for a second or two; it belongs into a start.
    """
    try:
        folder, toolchain = usable_cache_dir(cache_dirs()), find_toolchain()
        return load_chain(build_library(folder, toolchain, source_dir=SOURCE_DIR))
    except BackendUnavailableError as error:
        logger.warning("prefixes are hashed without compiled code", extra={"why": str(error)})
        return None
