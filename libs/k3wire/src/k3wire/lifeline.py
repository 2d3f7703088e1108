"""What keeps a process from outliving the one that started it."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
"""Source: prctl(2)."""

LINUX_LIBRARY = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


def die_with_parent(parent_pid: int) -> Callable[[], None]:
    """Makes what a child runs, so that the kernel ends it with its parent.

    It may run right after the fork, since the request survives an exec, or in the program itself.
    The kernel watches the thread that forked, which must be the main one. Linux only; elsewhere
    nothing is asked.

    Args:
        parent_pid: of the process that forks.
    """

    def ask() -> None:
        if LINUX_LIBRARY is None:
            return
        LINUX_LIBRARY.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            # The parent died before the request was made.
            os.kill(os.getpid(), signal.SIGKILL)

    return ask
