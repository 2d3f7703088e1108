"""Starts workers as forks of one process that has loaded what they share.

Loading torch takes seconds of processor time. The workers that need it (encoder, prefill, decode)
would each take them, on the same few cores, at each start; here one process does it once, beside the
start of the infrastructure, and each worker begins as a copy of it. Pages nobody writes are shared.

    supervisor ──socket──► nursery (one thread, never works) ──fork──► worker
               ◄─ pids, exit codes ─┘

Fork is safe here because the nursery has no second thread and no connection. A worker dies with the
nursery, and the nursery with the supervisor. Linux only.

A line of JSON each way: `{"job": 1, "module": …, "environment": …, "log": …}`, answered by `{"job": 1, "pid": …}`;
later `{"pid": …, "code": …}`, negative for a signal.
"""

import asyncio
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3wire.lifeline import LINUX_LIBRARY, die_with_parent

PR_SET_NAME = 15
"""Source: prctl(2)."""

SHORTEST_READ = 65_536


class NurseryEnded(OSError):
    """The nursery went away; what it had started went with it."""


@dataclass(slots=True)
class Forked:
    """A worker, with what the supervisor uses of `asyncio.subprocess.Process`.

    Attributes:
        pid: process id.
        returncode: None while it runs; negative is the signal that ended it.
    """

    pid: int
    _pidfd: int
    returncode: int | None = None
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> int:
        """Waits for the end."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        """Asks it to end.

        Raises:
            ProcessLookupError: it has ended.
        """
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it.

        Raises:
            ProcessLookupError: it has ended.
        """
        self._send(signal.SIGKILL)

    def end(self, code: int) -> None:
        """Notes how it ended; safe twice."""
        if self.returncode is None:
            self.returncode = code
            os.close(self._pidfd)
            self._ended.set()

    def _send(self, number: int) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        # By descriptor: the number may be another process's by now.
        signal.pidfd_send_signal(self._pidfd, number)


class Nursery:
    """The supervisor's side."""

    def __init__(
        self, preload: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> None:
        """Prepares; `open` starts the process.

        Args:
            preload: modules to load before the first fork.
            environment: of the process, all of it.
            log_path: where the nursery's own output goes, appended.
        """
        self._preload = tuple(preload)
        self._environment = dict(environment)
        self._log_path = log_path
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._hearing: asyncio.Task[None] | None = None
        self._num_jobs = 0
        self._jobs: dict[int, asyncio.Future[Forked]] = {}
        self._forked: dict[int, Forked] = {}
        self._opening = asyncio.Lock()

    @property
    def pid(self) -> int:
        """Process id, 0 while there is none."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else 0

    async def open(self) -> None:
        """Starts the process, which begins to load at once."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._log_path.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "k3ctl.stack.nursery", str(theirs.fileno())),
                    *self._preload,
                    env=self._environment,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                    preexec_fn=die_with_parent(os.getpid()),
                    start_new_session=True,
                )
            reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            # A start that is given up here leaves no socket; `close` ends the process.
            ours.close()
            raise
        self._hearing = asyncio.get_running_loop().create_task(self._hear(reader, self._process))

    async def fork(self, module: str, environment: Mapping[str, str], log_path: Path) -> Forked:
        """Starts a worker; opens the nursery again if it has gone.

        Args:
            module: run as `python -m` would.
            environment: all of it; what was read as torch was loaded is the nursery's.
            log_path: where its output goes, appended.

        Raises:
            NurseryEnded: the nursery died before it answered.
        """
        async with self._opening:
            if self._writer is None:
                await self.open()
        writer = self._writer
        if writer is None:
            raise NurseryEnded("The nursery ended as it began; see nursery.log")
        self._num_jobs += 1
        job = self._num_jobs
        answer = self._jobs[job] = asyncio.get_running_loop().create_future()
        line = {
            "job": job,
            "module": module,
            "environment": dict(environment),
            "log": str(log_path),
        }
        writer.write(json.dumps(line).encode() + b"\n")
        return await answer

    async def close(self) -> None:
        """Ends the process, whose workers have been stopped, whatever it does; safe twice."""
        if self._writer is not None:
            self._writer.close()
        if self._process is not None and self._process.returncode is None:
            # It may be loading still, and would read the end of its work only seconds later.
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        if self._hearing is not None:
            await self._hearing

    async def _hear(
        self, reader: asyncio.StreamReader, process: asyncio.subprocess.Process
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                self._note(json.loads(line))
        # Nothing comes any more: it has ended, or ends now, and its workers with it.
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        jobs, forked = list(self._jobs.values()), list(self._forked.values())
        self._jobs.clear()
        self._forked.clear()
        for answer in jobs:
            if not answer.done():
                answer.set_exception(NurseryEnded("The nursery ended; see nursery.log"))
        for worker in forked:
            worker.end(-signal.SIGKILL)

    def _note(self, told: Any) -> None:
        pid = told["pid"]
        if "job" not in told:
            worker = self._forked.pop(pid, None)
            if worker is not None:
                worker.end(told["code"])
            return
        answer = self._jobs.pop(told["job"])
        try:
            worker = Forked(pid, os.pidfd_open(pid))
        except ProcessLookupError as error:
            if not answer.done():
                answer.set_exception(error)
            return
        self._forked[pid] = worker
        if answer.done():
            # Whoever asked has gone.
            worker.kill()
        else:
            answer.set_result(worker)


@dataclass(frozen=True, slots=True)
class Job:
    """What a fork is to become."""

    module: str
    environment: Mapping[str, str]
    log: str


def tend(channel: socket.socket) -> Job | None:
    """Forks on request and tells who ended, until the supervisor goes.

    Returns:
        None in the nursery itself; in each fork, what it is to run.
    """
    ended_read, ended_write = os.pipe()
    os.set_blocking(ended_write, False)
    signal.set_wakeup_fd(ended_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    own_pid, pending = os.getpid(), b""
    while True:
        ready, _, _ = select.select([channel, ended_read], [], [])
        if ended_read in ready:
            os.read(ended_read, SHORTEST_READ)
            _tell_ends(channel)
        if channel not in ready:
            continue
        data = channel.recv(SHORTEST_READ)
        if not data:
            return None
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            asked = json.loads(line)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(ended_read)
                os.close(ended_write)
                die_with_parent(own_pid)()
                return Job(asked["module"], asked["environment"], asked["log"])
            _tell(channel, {"job": asked["job"], "pid": pid})


def _tell_ends(channel: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            _tell(channel, {"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _tell(channel: socket.socket, line: Mapping[str, int]) -> None:
    # A supervisor that has gone is noticed at the next read.
    with contextlib.suppress(OSError):
        channel.sendall(json.dumps(line).encode() + b"\n")


def _become(job: Job) -> None:
    """Makes a fork look like a process of its own, and runs its module to the end."""
    os.setsid()
    os.environ.clear()
    os.environ.update(job.environment)
    log = os.open(job.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.argv = [job.module]
    if LINUX_LIBRARY is not None:
        LINUX_LIBRARY.prctl(PR_SET_NAME, ctypes.c_char_p(job.module[:15].encode()))
    runpy.run_module(job.module, run_name="__main__", alter_sys=True)


def main() -> None:
    """`python -m k3ctl.stack.nursery DESCRIPTOR MODULE…`: loads the modules, then tends."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    # What is loaded stays: a collection in a fork must not write to every shared page.
    gc.collect()
    gc.freeze()
    job = tend(channel)
    channel.close()
    if job is not None:
        _become(job)


if __name__ == "__main__":
    main()
