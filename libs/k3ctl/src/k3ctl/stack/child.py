"""One child process: started so that it cannot outlive its parent, watched, restarted, stopped."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

PR_SET_PDEATHSIG = 1
"""Source: prctl(2)."""

FIRST_BACKOFF_S = 0.2
LAST_BACKOFF_S = 5.0
MAX_CRASHES = 6
CRASH_WINDOW_S = 60.0
"""So many crashes within so long are a crash loop: the child stays down."""

Phase = Literal["starting", "running", "backing off", "crash loop", "stopped"]


def die_with_parent() -> None:
    """Asks the kernel to kill this process when the thread that made it ends.

    For `preexec_fn`: runs between fork and exec. Linux only; elsewhere it does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        # The parent died before the request was made.
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(slots=True)
class Child:
    """One process of the stack.

    Attributes:
        name: unique in the stack, e.g. `prefill-0`.
        role: service or infrastructure it is.
        command: program and arguments.
        environment: all of it.
        log_path: where its output goes, appended.
        on_change: called after each change of phase.
        phase: where it is.
        process: the running one.
        num_restarts: after the first start.
        exit_code: of the last end.
    """

    name: str
    role: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log_path: Path
    on_change: Callable[[], None]
    phase: Phase = "starting"
    process: asyncio.subprocess.Process | None = None
    num_restarts: int = 0
    exit_code: int | None = None
    _crashes: list[float] = field(default_factory=list[float])
    _is_stopping: bool = False

    @property
    def pid(self) -> int:
        """Process id, 0 while there is none."""
        process = self.process
        return process.pid if process is not None and process.returncode is None else 0

    def _set(self, phase: Phase) -> None:
        self.phase = phase
        self.on_change()

    async def start(self) -> None:
        """Starts the process once.

        Raises:
            OSError: the program cannot be run.
        """
        with self.log_path.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                env=dict(self.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
                # Ctrl-C is the supervisor's to handle: it stops its children in order.
                start_new_session=True,
            )
        self._set("running")

    async def keep_running(self) -> None:
        """Waits for ends and starts again, with growing pauses, until stopped or in a crash loop."""
        while not self._is_stopping:
            assert self.process is not None
            self.exit_code = await self.process.wait()
            if self._is_stopping:
                break
            now_s = time.monotonic()
            self._crashes = [s for s in self._crashes if s > now_s - CRASH_WINDOW_S] + [now_s]
            if len(self._crashes) >= MAX_CRASHES:
                self._set("crash loop")
                return
            self._set("backing off")
            pause_s = FIRST_BACKOFF_S * 2 ** (len(self._crashes) - 1)
            await asyncio.sleep(min(pause_s, LAST_BACKOFF_S))
            if not self._is_stopping:
                self.num_restarts += 1
                await self.start()

    async def stop(self, grace_s: float) -> None:
        """Asks the process to end, and kills it after the grace period; safe twice."""
        self._is_stopping = True
        process = self.process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(grace_s):
                    await process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        self._set("stopped")

    def log_tail(self, num_lines: int = 5) -> str:
        """Gives the last lines of its log, for an error message."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-num_lines:])
