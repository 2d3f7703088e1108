"""Brings Mooncake's native modules into the process: bounds first, system libraries, then import.

The library reads its bounds from the environment while it is imported, and needs libibverbs even
for TCP; so both must be there before. A process that has set the library up must not fork: use
spawn (the gate of `native_gate` refuses calls in a forked child, which would hang for ever).
"""

import os
from types import ModuleType
from typing import Literal

from k3core.transfer.system_libraries import preload

BOUNDS = {
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",
    "MC_TRANSFER_TIMEOUT": "5",
    "MC_RPC_TIMEOUT_MS": "3000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "3000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_LOG_LEVEL": "ERROR",
}
"""Bounds of the native library, 30 s each and 20 retries otherwise. The operator's own win."""


class NotInstalled(Exception):
    """The library cannot be loaded on this machine; the message says what to install."""


def load_native(module: Literal["engine", "store"]) -> ModuleType:
    """Imports one native module.

    Raises:
        NotInstalled: the library or a system library is missing.
    """
    for name, value in BOUNDS.items():
        os.environ.setdefault(name, value)
    if not preload():
        raise NotInstalled(
            "Mooncake needs libibverbs.so.1: run `make setup`, or install the package libibverbs1"
        )
    try:
        # Imported here because the environment above must be set, and the libraries loaded, first.
        if module == "engine":
            import mooncake.engine as native
        else:
            import mooncake.store as native
    except ImportError as error:
        raise NotInstalled("Mooncake is not installed: run `make setup`") from error
    return native
