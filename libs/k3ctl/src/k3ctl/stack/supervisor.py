"""The supervisor: starts the whole stack on loopback, keeps it running, ends it in order.

Order of a start: NATS, Redis and Mooncake's master side by side; then the store node and all
workers side by side. Ready means that every worker said so in a heartbeat from the process that
was started here. Order of an end: gateway, then the other workers, then the infrastructure. No
child outlives the supervisor, even if it is killed.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from k3ctl.stack import infrastructure as infra
from k3ctl.stack.child import Child
from k3ctl.stack.state import ProcessState, StackState, write_state
from k3wire.bus.nats_bus import NatsBus
from k3wire.service.directory import Directory

SERVICES = ("gateway", "fetcher", "preprocessor", "encoder", "prefill", "decode")
READY_TIMEOUT_S = 120.0
GRACE_S = 10.0
INFRASTRUCTURE_GRACE_S = 2.0
REDIS_BYTES = 256 * 1024 * 1024
SEGMENT_BYTES = 512 * 1024 * 1024


class StackFailed(Exception):
    """The stack does not come up; the message says which child and why."""


@dataclass(frozen=True, slots=True)
class StackPlan:
    """What to run.

    Attributes:
        folder: for logs, traces and the state.
        checkpoint: directory of the model.
        engine: `model` or `scripted`.
        script: of the scripted engine, "" for none.
        num_workers: processes by role; a role that is missing runs once.
    """

    folder: Path
    checkpoint: Path
    engine: str = "model"
    script: str = ""
    num_workers: dict[str, int] = field(default_factory=dict[str, int])


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
        self._urls = {"nats": "", "redis": "", "mooncake": ""}
        self.children: list[Child] = []
        self.gateway_url = ""

    def stop(self) -> None:
        """Asks for an orderly end; safe twice."""
        self._stop.set()

    async def run(self, on_ready: Callable[[StackState], None]) -> None:
        """Starts everything, keeps it running until `stop`, ends everything.

        Args:
            on_ready: called once, when every worker is ready.

        Raises:
            StackFailed: something does not come up.
            MissingProgram: something is not installed.
        """
        (self._plan.folder / "traces").mkdir(parents=True, exist_ok=True)
        try:
            async with asyncio.TaskGroup() as group:
                keepers = group.create_task(self._run(group, on_ready))
                await keepers
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _run(self, group: asyncio.TaskGroup, on_ready: Callable[[StackState], None]) -> None:
        keepers: list[asyncio.Task[None]] = []
        bus: NatsBus | None = None
        try:
            await self._start_infrastructure()
            await self._start_workers()
            keepers = [group.create_task(child.keep_running()) for child in self.children]
            bus = await NatsBus.connect(self._urls["nats"], "k3 up")
            await self._directory.follow(bus)
            if await self._wait_ready():
                self._ready_after_s = time.time() - self._started_s
                self._write()
                on_ready(self.state())
                await self._stop.wait()
        finally:
            if bus is not None:
                await bus.close()
            await self._end()
            for keeper in keepers:
                keeper.cancel()

    def _child(self, name: str, role: str, command: list[str], env: dict[str, str]) -> Child:
        log = self._plan.folder / f"{name}.log"
        log.unlink(missing_ok=True)
        child = Child(name, role, command, env, log, self._write)
        self.children.append(child)
        return child

    async def _start_infrastructure(self) -> None:
        folder, settings = self._plan.folder, os.environ
        self._say("starting NATS, Redis and Mooncake")
        environment = infra.library_environment()
        redis_port = infra.port_setting(settings, "K3_UP_REDIS_PORT") or infra.free_port()
        master_port = infra.port_setting(settings, "K3_UP_MOONCAKE_PORT") or infra.free_port()
        nats_port = infra.port_setting(settings, "K3_UP_NATS_PORT") or infra.free_port()
        nats = self._child("nats", "nats", infra.nats_command(folder, nats_port), environment)
        redis = self._child(
            "redis", "redis", infra.redis_command(redis_port, REDIS_BYTES), environment
        )
        master = self._child(
            "mooncake",
            "mooncake",
            infra.mooncake_master_command(master_port, infra.free_port()),
            environment,
        )
        for child in (nats, redis, master):
            await child.start()
        try:
            self._urls["nats"] = await infra.nats_url(folder, nats.pid)
            await infra.wait_for_port(redis_port)
            await infra.wait_for_port(master_port)
        except TimeoutError as error:
            raise StackFailed(self._why_down()) from error
        self._urls["redis"] = f"redis://{infra.LOOPBACK}:{redis_port}/0"
        self._urls["mooncake"] = f"{infra.LOOPBACK}:{master_port}"

    async def _start_workers(self) -> None:
        self._say("starting the workers")
        node = self._child(
            "mooncake-store",
            "mooncake-store",
            infra.mooncake_node_command(self._urls["mooncake"], infra.free_port(), SEGMENT_BYTES),
            infra.library_environment(),
        )
        await node.start()
        # The slowest to start come first: they read the checkpoint.
        for role in ("prefill", "decode", "encoder", "preprocessor", "fetcher", "gateway"):
            for index in range(self._plan.num_workers.get(role, 1)):
                name = f"{role}-{index}"
                command = [sys.executable, "-m", f"k3_{role}"]
                await self._child(name, role, command, self._environment()).start()

    def _environment(self) -> dict[str, str]:
        plan = self._plan
        environment = infra.library_environment()
        environment.setdefault("K3_GATEWAY_PORT", "0")
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.setdefault("K3_TRACE_DIR", str((plan.folder / "traces").resolve()))
        for name in [name for name in environment if name.startswith("K3_UP_")]:
            del environment[name]
        return environment | {
            "K3_NATS_URL": self._urls["nats"],
            "K3_REDIS_URL": self._urls["redis"],
            "K3_MOONCAKE_MASTER": self._urls["mooncake"],
            "K3_CHECKPOINT": str(plan.checkpoint.resolve()),
            "K3_ENGINE": plan.engine,
            "K3_SCRIPT": plan.script,
            "PYTHONUNBUFFERED": "1",
        }

    async def _wait_ready(self) -> bool:
        """Waits for every worker; False if a stop came first."""
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        shown: set[str] = set()
        while not self._stop.is_set():
            beats = {beat.pid: beat for beat in self._directory.all() if beat.is_ready}
            workers = [child for child in self.children if child.role in SERVICES]
            for child in workers:
                if child.phase == "crash loop":
                    raise StackFailed(self._why_down())
                if child.pid in beats and child.name not in shown:
                    shown.add(child.name)
                    after_s = time.time() - self._started_s
                    self._say(f"  {child.name:16} ready after {after_s:.1f} s")
                    if child.role == "gateway":
                        self.gateway_url = beats[child.pid].endpoint
            if len(shown) == len(workers):
                return True
            if time.monotonic() > deadline_s:
                raise StackFailed(self._why_down())
            try:
                async with asyncio.timeout(0.05):
                    await self._stop.wait()
            except TimeoutError:
                continue
        return False

    def _why_down(self) -> str:
        bad = [c for c in self.children if c.phase != "running" or c.exit_code is not None]
        child = (bad or self.children)[0]
        return (
            f"{child.name} does not come up (exit code {child.exit_code}); "
            f"the end of {child.log_path}:\n{child.log_tail()}"
        )

    async def _end(self) -> None:
        self._say("stopping")
        groups = (
            [child for child in self.children if child.role == "gateway"],
            [c for c in self.children if c.role in SERVICES and c.role != "gateway"],
            [child for child in self.children if child.role not in SERVICES],
        )
        for index, children in enumerate(groups):
            grace_s = INFRASTRUCTURE_GRACE_S if index == len(groups) - 1 else GRACE_S
            await asyncio.gather(*(child.stop(grace_s) for child in children))

    def state(self) -> StackState:
        """Describes the stack as it is now."""
        plan = self._plan
        return StackState(
            supervisor_pid=os.getpid(),
            folder=str(plan.folder.resolve()),
            is_ready=self._ready_after_s > 0,
            started_unix_s=self._started_s,
            ready_after_s=round(self._ready_after_s, 2),
            gateway_url=self.gateway_url,
            nats_url=self._urls["nats"],
            redis_url=self._urls["redis"],
            mooncake_master=self._urls["mooncake"],
            checkpoint=str(plan.checkpoint.resolve()),
            model=os.environ.get("K3_GATEWAY_MODEL_NAME") or plan.checkpoint.resolve().name,
            engine=plan.engine,
            processes=tuple(
                ProcessState(
                    name=child.name,
                    role=child.role,
                    pid=child.pid,
                    phase=child.phase,
                    num_restarts=child.num_restarts,
                    exit_code=child.exit_code,
                    log=str(child.log_path.resolve()),
                )
                for child in self.children
            ),
        )

    def _write(self) -> None:
        write_state(self._plan.folder, self.state())
