"""What a supervised process must offer, and what keeps it from outliving its parent."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Protocol

PR_SET_PDEATHSIG = 1
"""Source: prctl(2)."""

LINUX_LIBRARY = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


class RunningProcess(Protocol):
    """A started process, as `asyncio.subprocess.Process` is one."""

    @property
    def pid(self) -> int:
        """Process id."""
        ...

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative is the signal that ended it."""
        ...

    async def wait(self) -> int:
        """Waits for the end; gives the code."""
        ...

    def terminate(self) -> None:
        """Asks it to end; `ProcessLookupError` if it has ended."""
        ...

    def kill(self) -> None:
        """Ends it; `ProcessLookupError` if it has ended."""
        ...


def die_with_parent(parent_pid: int) -> Callable[[], None]:
    """Makes what a child runs after its fork, so that the kernel ends it with its parent.

    The kernel watches the thread that forked, which must be the main one. The request survives an
    exec. Linux only; elsewhere nothing is asked.

    Args:
        parent_pid: of the process that will fork.
    """

    def ask() -> None:
        if LINUX_LIBRARY is None:
            return
        LINUX_LIBRARY.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            # The parent died before the request was made.
            os.kill(os.getpid(), signal.SIGKILL)

    return ask
