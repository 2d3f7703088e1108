"""Shared libraries that Mooncake needs and a bare machine may lack.

Mooncake's wheel is linked to libibverbs even when only TCP is used. Where the system has none, the
set-up unpacks the distribution's package into a folder of the virtual environment, without root;
they are loaded from there before Mooncake is imported. Programs find them by `LD_LIBRARY_PATH`.
"""

import contextlib
import ctypes
import os
import sys
from pathlib import Path

LIBRARIES = ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1")
"""In the order in which they need each other."""

PATH_VARIABLE = "K3_LIBRARY_PATH"


def private_folder() -> Path:
    """Where the set-up puts unpacked libraries: named by `K3_LIBRARY_PATH`, or in the venv."""
    named = os.environ.get(PATH_VARIABLE)
    return Path(named) if named else Path(sys.prefix) / "lib" / "k3"


def is_in_system() -> bool:
    """Whether the system's own loader finds libibverbs."""
    try:
        ctypes.CDLL(LIBRARIES[-1])
    except OSError:
        return False
    return True


def preload() -> bool:
    """Makes the libraries available to this process; says whether they are."""
    if is_in_system():
        return True
    folder = private_folder()
    for name in LIBRARIES:
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    return is_in_system()
