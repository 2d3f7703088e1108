"""One child process: started so that it cannot outlive its parent, watched, restarted, stopped.

starting ──► running ──end──► backing off ──► running …
│                  └─ too many ends ──► crash loop
└── stop ──► stopped
"""

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from k3ctl.stack.process import RunningProcess
from k3wire.lifeline import die_with_parent

WRONG_SETTINGS = 2
"""Exit code of a worker that refuses its settings: it would refuse them again."""

TROUBLE_ENDS = 3
"""Ends within the window of patience from which a person is told."""

LAST_WORDS_BYTES = 16_384
MAX_ERROR_CHARS = 240
_CALM = re.compile(
    r"""^\s|^[\d:.]+\ (DEBUG|INFO|WARNING)\ |"level":"(DEBUG|INFO|WARNING)"
    |\[(TRC|DBG|INF|WRN)\]|^[IW]\d{4}\ |^\d+:[A-Z]\ .*\ [.*-]\ """,
    re.VERBOSE,
)
"""Lines that do not say why a process ended: a traceback's middle, and what is no error of ours,
of NATS, of Mooncake and of Redis."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How a child that ends by itself is started again.

    Attributes:
        first_backoff_s: pause before the first new start; doubles with each end.
        last_backoff_s: longest pause.
        max_ends: so many ends within the window are a crash loop: the child stays down.
        window_s: ends longer ago are forgiven.
    """

    first_backoff_s: float = 0.2
    last_backoff_s: float = 5.0
    max_ends: int = 6
    window_s: float = 60.0


Phase = Literal["starting", "running", "backing off", "crash loop", "stopped"]


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
        on_trouble: called when it keeps ending: once its ends within the window are
            `TROUBLE_ENDS`, and when it stays down.
        launch: starts the process another way than by the command; None: by the command.
        patience: how it is started again.
        phase: where it is.
        process: the running one.
        num_restarts: after the first start.
        exit_code: of the last end; negative is the signal that ended it.
    """

    name: str
    role: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log_path: Path
    on_change: Callable[[], None]
    on_trouble: Callable[["Child"], None] = lambda _: None
    launch: Callable[[], Awaitable[RunningProcess]] | None = None
    patience: Patience = field(default_factory=Patience)
    phase: Phase = "starting"
    process: RunningProcess | None = None
    num_restarts: int = 0
    exit_code: int | None = None
    _ends_s: list[float] = field(default_factory=list[float])
    _log_start: int = 0
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def pid(self) -> int:
        """Process id, 0 while there is none."""
        process = self.process
        return process.pid if process is not None and process.returncode is None else 0

    @property
    def num_ends(self) -> int:
        """How often it ended by itself of late, as of its last end."""
        return len(self._ends_s)

    def _set(self, phase: Phase) -> None:
        self.phase = phase
        self.on_change()

    async def start(self) -> None:
        """Starts the process once.

        Raises:
            OSError: the program cannot be run.
        """
        with contextlib.suppress(OSError):
            self._log_start = self.log_path.stat().st_size
        self.process = await (self.launch or self._execute)()
        self._set("running")

    async def _execute(self) -> RunningProcess:
        with self.log_path.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *self.command,
                env=dict(self.environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent(os.getpid()),
                # Ctrl-C is the supervisor's to handle: it stops its children in order.
                start_new_session=True,
            )

    async def keep_running(self) -> None:
        """Waits for ends and starts again, with growing pauses, until stopped or in a crash loop."""
        while True:
            assert self.process is not None
            self.exit_code = await self.process.wait()
            if self._stopping.is_set():
                return
            pause_s = None if self.exit_code == WRONG_SETTINGS else self._note_end()
            if pause_s is None:
                self._set("crash loop")
                self.on_trouble(self)
                return
            self._set("backing off")
            if self.num_ends == TROUBLE_ENDS:
                self.on_trouble(self)
            try:
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
                return
            except TimeoutError:
                pass
            self.num_restarts += 1
            # A program that cannot be run any more counts as one that ended at once.
            with contextlib.suppress(OSError):
                await self.start()
            if self._stopping.is_set():
                # The stop came between the pause and the new process, and saw neither.
                self.kill()

    def _note_end(self) -> float | None:
        """Counts an end; gives the pause before the next start, None for a crash loop."""
        now_s = time.monotonic()
        patience = self.patience
        self._ends_s = [s for s in self._ends_s if s > now_s - patience.window_s] + [now_s]
        if len(self._ends_s) >= patience.max_ends:
            return None
        pause_s = patience.first_backoff_s * 2 ** (len(self._ends_s) - 1)
        return min(pause_s, patience.last_backoff_s)

    def kill(self) -> None:
        """Ends the process at once and for good; safe when it is gone."""
        self._stopping.set()
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()

    async def stop(self, grace_s: float) -> None:
        """Asks the process to end, and kills it after the grace period; safe twice."""
        self._stopping.set()
        process = self.process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(grace_s):
                    await process.wait()
            except TimeoutError:
                self.kill()
                await process.wait()
        if self.phase != "crash loop":
            self._set("stopped")

    def log_tail(self, num_lines: int = 12) -> str:
        """Gives the last lines of its log, for an error message."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(f"  {line}" for line in lines[-num_lines:])

    def why_it_ended(self) -> str:
        """Says in one line how the process ended, with the last error in its log."""
        code = self.exit_code or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        error = self._last_error()
        return f"{how}, {error}" if error else how

    def _last_error(self) -> str:
        try:
            with self.log_path.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                # What an earlier process said is not what this one died of.
                log.seek(max(self._log_start, end - LAST_WORDS_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        errors = (line for line in reversed(lines) if line.strip() and not _CALM.search(line))
        return next(errors, "").strip()[:MAX_ERROR_CHARS]
