"""A prefill and a decode worker as processes, over a real NATS server and Mooncake."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from support.nats_server import nats_server
from support.worker_pair import Gateway

from k3core.transfer.system_libraries import preload
from k3wire.bus.nats_bus import NatsBus

START_S = 60.0
STOP_S = 10.0


def can_run_mooncake() -> bool:
    """Whether Mooncake's libraries are there."""
    return preload()


@dataclass
class Processes:
    """The processes of one test, by role."""

    gateway: Gateway
    environment: Mapping[str, str]
    children: dict[str, asyncio.subprocess.Process] = field(
        default_factory=dict[str, asyncio.subprocess.Process]
    )

    async def start(self, role: str) -> None:
        """Starts a worker; the gateway's `until_ready` says when it serves."""
        self.children[role] = await asyncio.create_subprocess_exec(
            sys.executable, "-m", f"k3_{role}", env=dict(self.environment)
        )

    async def ready(self) -> None:
        """Waits until both serve."""
        await self.gateway.until_ready("prefill", "decode", timeout_s=START_S)

    def kill(self, role: str) -> None:
        """As the kernel does to a process that takes too much."""
        self.children[role].send_signal(signal.SIGKILL)

    def terminate(self, role: str) -> None:
        """Asks for a drain."""
        self.children[role].send_signal(signal.SIGTERM)

    async def exit_status(self, role: str) -> int:
        """Waits, bounded, for a process's end."""
        async with asyncio.timeout(STOP_S):
            return await self.children[role].wait()


@contextlib.asynccontextmanager
async def worker_processes(
    folder: Path, checkpoint: Path, **settings: str
) -> AsyncIterator[Processes]:
    """Starts both and stops them, whatever happens."""
    (folder / "nats").mkdir()
    async with nats_server(folder / "nats") as url:
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("K3_")
        }
        environment |= {
            "K3_NATS_URL": url,
            "K3_CHECKPOINT": str(checkpoint),
            "OMP_NUM_THREADS": "1",
            **settings,
        }
        bus = await NatsBus.connect(url, "test")
        gateway = Gateway(bus)
        await gateway.listen()
        processes = Processes(gateway, environment)
        try:
            for role in ("prefill", "decode"):
                await processes.start(role)
            await processes.ready()
            yield processes
        finally:
            for child in processes.children.values():
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()
            await bus.close()
