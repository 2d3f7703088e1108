"""The supervisor: starts the whole stack on loopback, keeps it running, ends it in order.

Order of a start: NATS, Redis and Mooncake's master side by side, and beside them the nursery loads
what the workers of the model share; then the store node and all workers side by side. Ready means that every worker said so in a heartbeat from the process that
was started here; a stop in between ends the start where it is. Order of an end: gateway, then the other workers, then the infrastructure. No
child outlives the supervisor, even if it is killed.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from k3ctl.stack import infrastructure as infra
from k3ctl.stack.child import Child
from k3ctl.stack.nursery import Nursery, NurseryEnded
from k3ctl.stack.plan import SERVICES, TORCH_SERVICES, Endpoints, StackPlan
from k3ctl.stack.state import ProcessState, StackState, is_running, start_ticks, write_state
from k3ctl.terminal import printable
from k3wire.bus.nats_bus import NatsBus
from k3wire.messages.control import Heartbeat
from k3wire.service.directory import Directory

READY_TIMEOUT_S = 120.0
INFRASTRUCTURE_GRACE_S = 2.0
LAST_WORDS_S = 3.0
"""What a worker needs after its grace period, to say farewell and write its traces."""

LOOK_S = 0.05
"""Between two looks at the heartbeats while the stack starts."""


class StackFailed(Exception):
    """The stack does not come up; the message says which child and why."""


class Supervisor:
    """Runs one stack.

    Attributes:
        children: all processes, infrastructure first.
        gateway_url: of the API, once ready.
    """

    def __init__(self, plan: StackPlan, say: Callable[[str], None]) -> None:
        """Prepares; `run` starts.

        Args:
            plan: what to run.
            say: shows one line of progress to a person.
        """
        self._plan = plan
        self._say = say
        self._stop = asyncio.Event()
        self._started_s = time.time()
        self._ready_after_s = 0.0
        self._directory = Directory()
        self._endpoints = Endpoints()
        self._nursery = _nursery(plan)
        self._bus: NatsBus | None = None
        self.children: list[Child] = []
        self.gateway_url = ""

    def stop(self) -> None:
        """Asks for an orderly end; safe twice."""
        self._stop.set()

    def interrupt(self) -> None:
        """A person's wish to end: in order at first, and at once when it comes again."""
        if self._stop.is_set():
            for child in self.children:
                child.kill()
        self.stop()

    async def wait_stopping(self) -> None:
        """Waits until somebody asks for the end."""
        await self._stop.wait()

    async def run(self, on_ready: Callable[[StackState], None]) -> None:
        """Starts everything, keeps it running until `stop`, ends everything.

        Args:
            on_ready: called once, when every worker is ready.

        Raises:
            StackFailed: something does not come up.
            MissingProgram: something is not installed.
        """
        _clear(self._plan)
        try:
            async with asyncio.TaskGroup() as group:
                await self._run(group, on_ready)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _run(self, group: asyncio.TaskGroup, on_ready: Callable[[StackState], None]) -> None:
        keepers: list[asyncio.Task[None]] = []
        try:
            if await self._unless_stopped(self._start()):
                keepers = [group.create_task(child.keep_running()) for child in self.children]
                if await self._unless_stopped(self._follow()) and await self._wait_ready():
                    self._ready_after_s = time.time() - self._started_s
                    self._write()
                    on_ready(self.state())
                    await self._stop.wait()
        finally:
            if self._bus is not None:
                await self._bus.close()
            await self._end()
            if self._nursery is not None:
                await self._nursery.close()
            for keeper in keepers:
                keeper.cancel()

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Does a part of the start; False if a stop came first, which cancels it."""
        loop = asyncio.get_running_loop()
        working, stopping = loop.create_task(work), loop.create_task(self._stop.wait())
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not working.done():
                working.cancel()
                # What it was about to start is taken back before anything else is stopped.
                await asyncio.wait((working,))
        if self._stop.is_set():
            # What else became of it no longer matters, but it has to be looked at.
            _ = working.cancelled() or working.exception()
            return False
        working.result()
        return True

    async def _start(self) -> None:
        if self._nursery is not None:
            await self._nursery.open()
        await self._start_infrastructure()
        await self._start_workers()

    async def _follow(self) -> None:
        self._bus = await NatsBus.connect(self._endpoints.nats_url, "k3 up")
        await self._directory.follow(self._bus)

    def add_child(
        self, name: str, role: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> Child:
        """Adds a process to the stack, not started yet; its output goes to a log of its name."""
        log = self._plan.folder / f"{name}.log"
        child = Child(name, role, command, environment, log, self._write, self._tell_trouble)
        self.children.append(child)
        return child

    async def _start_infrastructure(self) -> None:
        self._say("starting NATS, Redis and Mooncake")
        folder, settings = self._plan.folder, self._plan.settings
        environment = infra.library_environment(self._plan.environment)
        nats_port = settings.nats_port or infra.free_port()
        redis_port = settings.redis_port or infra.free_port()
        master_port = settings.mooncake_port or infra.free_port()
        commands = {
            "nats": infra.nats_command(folder, nats_port),
            "redis": infra.redis_command(redis_port, settings.redis_bytes),
            "mooncake": infra.mooncake_master_command(master_port, infra.free_port()),
        }
        ports = {"nats": nats_port, "redis": redis_port, "mooncake": master_port}
        children = [
            self.add_child(name, name, command, environment) for name, command in commands.items()
        ]
        for child in children:
            await child.start()
        await asyncio.gather(*(self._wait_up(child, ports[child.name]) for child in children))
        self._endpoints = Endpoints(
            nats_url=f"nats://{infra.LOOPBACK}:{nats_port}",
            redis_url=f"redis://{infra.LOOPBACK}:{redis_port}/0",
            mooncake_master=f"{infra.LOOPBACK}:{master_port}",
        )

    async def _wait_up(self, child: Child, port: int) -> None:
        # Both: a port that answers may be somebody else's, whose place our child could not take.
        try:
            await infra.wait_for_listener(port, child.pid)
        except TimeoutError as error:
            raise StackFailed(_why_down(child)) from error

    async def _start_workers(self) -> None:
        self._say("starting the workers")
        node = infra.mooncake_node_command(
            self._endpoints.mooncake_master, infra.free_port(), self._plan.settings.segment_bytes
        )
        environment = infra.library_environment(self._plan.environment)
        await self.add_child("mooncake-store", "mooncake-store", node, environment).start()
        environment = self._plan.worker_environment(self._endpoints)
        starts: list[Coroutine[Any, Any, None]] = []
        for name, role in self._plan.workers():
            child = self.add_child(name, role, [sys.executable, "-m", f"k3_{role}"], environment)
            if self._nursery is not None and role in TORCH_SERVICES:
                child.launch = partial(
                    self._nursery.fork, f"k3_{role}", environment, child.log_path.resolve()
                )
            starts.append(child.start())
        try:
            await asyncio.gather(*starts)
        except NurseryEnded as error:
            raise StackFailed(f"{error} in {self._plan.folder}") from error

    async def _wait_ready(self) -> bool:
        """Waits for every worker; False if a stop came first."""
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        workers = [child for child in self.children if child.role in SERVICES]
        shown: set[str] = set()
        while not self._stop.is_set():
            beats = {beat.pid: beat for beat in self._directory.all() if beat.is_ready}
            for child in workers:
                if child.pid in beats and child.name not in shown:
                    shown.add(child.name)
                    self._welcome(child, beats[child.pid])
            if len(shown) == len(workers):
                return True
            lost = next((child for child in self.children if child.phase == "crash loop"), None)
            if lost is None and time.monotonic() > deadline_s:
                lost = next(child for child in workers if child.name not in shown)
            if lost is not None:
                raise StackFailed(_why_down(lost))
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._stop.wait()
            except TimeoutError:
                continue
        return False

    def _welcome(self, child: Child, beat: Heartbeat) -> None:
        self._say(f"  {child.name:16} ready after {time.time() - self._started_s:.1f} s")
        if child.role == "gateway":
            self.gateway_url = beat.endpoint

    def _tell_trouble(self, child: Child) -> None:
        stays_down = child.phase == "crash loop"
        if stays_down and not self._ready_after_s:
            # The start fails with it, and says so.
            return
        times = f"{child.num_ends} times within a minute" if child.num_ends > 1 else "by itself"
        what = "stays down" if stays_down else "is started again"
        why = printable(child.why_it_ended())
        self._say(f"{child.name} ended {times} and {what}: {why} ({child.log_path})")

    async def _end(self) -> None:
        self._say(
            f"stopping: running requests get up to {self._plan.grace_s:.0f} s; "
            "Ctrl-C again ends at once"
        )
        workers_s = self._plan.grace_s + LAST_WORDS_S
        gateways = [child for child in self.children if child.role == "gateway"]
        workers = [c for c in self.children if c.role in SERVICES and c.role != "gateway"]
        rest = [child for child in self.children if child.role not in SERVICES]
        for children, grace_s in (
            (gateways, workers_s),
            (workers, workers_s),
            (rest, INFRASTRUCTURE_GRACE_S),
        ):
            await asyncio.gather(*(child.stop(grace_s) for child in children))

    def state(self) -> StackState:
        """Describes the stack as it is now."""
        plan = self._plan
        return StackState(
            supervisor_pid=os.getpid(),
            supervisor_start_ticks=start_ticks(os.getpid()),
            folder=str(plan.folder.resolve()),
            is_ready=self._ready_after_s > 0,
            started_unix_s=self._started_s,
            ready_after_s=round(self._ready_after_s, 2),
            gateway_url=self.gateway_url,
            nats_url=self._endpoints.nats_url,
            redis_url=self._endpoints.redis_url,
            mooncake_master=self._endpoints.mooncake_master,
            checkpoint=str(plan.checkpoint.resolve()),
            model=plan.model_name,
            engine=plan.engine,
            processes=tuple(map(_describe, self.children)),
        )

    def _write(self) -> None:
        write_state(self._plan.folder, self.state())


def _nursery(plan: StackPlan) -> Nursery | None:
    """Where the workers of the model are forked; None if none runs or the system has no such fork."""
    roles = {role for _, role in plan.workers()} & set(TORCH_SERVICES)
    if plan.engine != "model" or not roles or not sys.platform.startswith("linux"):
        return None
    preload = ("k3core.engine.assembly", *(f"k3_{role}.main" for role in sorted(roles)))
    environment = plan.worker_environment(Endpoints())
    return Nursery(preload, environment, plan.folder / "nursery.log")


def _clear(plan: StackPlan) -> None:
    """Makes the folder, and takes the logs and traces of the run before out of it."""
    traces = plan.folder / "traces"
    traces.mkdir(parents=True, exist_ok=True)
    for old in (*plan.folder.glob("*.log"), *traces.glob("*.jsonl")):
        old.unlink()


def _describe(child: Child) -> ProcessState:
    return ProcessState(
        name=child.name,
        role=child.role,
        pid=child.pid,
        phase=child.phase,
        num_restarts=child.num_restarts,
        exit_code=child.exit_code,
        log=str(child.log_path.resolve()),
    )


def _why_down(child: Child) -> str:
    code = "" if child.exit_code is None else f" with exit code {child.exit_code}"
    state = "is not ready" if is_running(child.pid) else f"ended{code}"
    return f"{child.name} {state}; the end of {child.log_path}:\n{child.log_tail()}"
