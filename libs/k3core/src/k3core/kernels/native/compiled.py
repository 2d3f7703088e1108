"""The loaded native kernels: typed entry points over data pointers.

Enters a shared object from `build.py`; leaves a `NativeLibrary`, whose functions release the
interpreter lock while they run. Callers own every buffer. A non-zero result means that
scratch memory could not be had.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import torch

from k3core.kernels.errors import BackendUnavailableError
from k3core.kernels.native.arguments import STRUCT_ENTRIES

# A C entry point: ctypes gives no better type for what it makes at run time.
Function: TypeAlias = Callable[..., int]

TYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """Entry points by name, as the C sources call them.

    Attributes:
        path: of the shared object.
        entries: C functions of one address; each returns 0, or 1 when out of memory.
        set_threads: how many threads later calls may use, for the whole process.
        get_threads: the number that is set.
    """

    path: Path
    entries: dict[str, Function]
    set_threads: Callable[[int], None]
    get_threads: Callable[[], int]


def load_library(path: Path) -> NativeLibrary:
    """Load a compiled library and let it use as many threads as torch does.

    Raises:
        BackendUnavailableError: the file cannot be loaded here.
    """
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendUnavailableError(f"native kernels do not load: {error}") from error
    entries: dict[str, Function] = {}
    for name in STRUCT_ENTRIES:
        function = getattr(handle, name)
        function.argtypes = (ctypes.c_void_p,)
        function.restype = ctypes.c_int
        entries[name] = function
    handle.k3_set_threads.argtypes = (ctypes.c_int,)
    handle.k3_set_threads.restype = None
    handle.k3_get_threads.argtypes = ()
    handle.k3_get_threads.restype = ctypes.c_int
    handle.k3_set_threads(torch.get_num_threads())
    return NativeLibrary(path, entries, handle.k3_set_threads, handle.k3_get_threads)


def check(status: int) -> None:
    """Raise what a C entry point's result says.

    Raises:
        MemoryError: scratch memory could not be had.
    """
    if status != 0:
        raise MemoryError("native kernel: no memory for scratch")


def type_code(tensor: torch.Tensor) -> int:
    """The C code of a tensor's element type.

    Raises:
        TypeError: neither float32 nor bfloat16, or a gradient would be lost.
    """
    code = TYPE_CODES.get(tensor.dtype)
    if code is None:
        raise TypeError(f"native kernels take float32 and bfloat16, not {tensor.dtype}")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise TypeError("native kernels compute no gradients: use inference mode")
    return code


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """[..., D] as [rows, D] with a dense last axis; a copy only where strides demand one."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


@lru_cache(maxsize=256)
def long_array(values: tuple[int, ...]) -> "ctypes.Array[ctypes.c_int64]":
    """A C array of 64-bit integers; the same object for the same values, never written.

    A caller that hands on its address holds the array until C has returned: meanwhile the lock
    is free, and calls of another thread may push it out of the cache.
    """
    return (ctypes.c_int64 * len(values))(*values)


@lru_cache(maxsize=256)
def byte_array(values: tuple[bool, ...]) -> "ctypes.Array[ctypes.c_uint8]":
    """A C array of flags; the same object for the same values; to be held as `long_array`."""
    return (ctypes.c_uint8 * len(values))(*values)
