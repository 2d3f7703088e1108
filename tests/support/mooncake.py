"""A real Mooncake master and a node that owns a segment, on free loopback ports, for a test."""

import asyncio
import contextlib
import os
import shutil
import socket
import sysconfig
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from k3core.transfer.system_libraries import private_folder

START_S = 10.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def binary(name: str) -> str:
    beside = Path(sysconfig.get_path("scripts")) / name
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found, f"{name} is not installed; run make setup"
    return found


def environment() -> dict[str, str]:
    paths = f"{private_folder()}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    return {**os.environ, "LD_LIBRARY_PATH": paths}


async def wait_for_port(port: int) -> None:
    async with asyncio.timeout(START_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return


async def start(name: str, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        binary(name), *arguments, env=environment(),
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip


async def kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


async def start_master(port: int) -> asyncio.subprocess.Process:
    """Starts a master on a given port, so that it can come back where it was."""
    process = await start(
        "mooncake_master", "--rpc_address=127.0.0.1", f"--rpc_port={port}",
        "--metrics_host=127.0.0.1", f"--metrics_port={free_port()}",
        "--default_kv_lease_ttl=500", "--client_ttl=5", "--put_start_discard_timeout_sec=5",
    )  # fmt: skip
    await wait_for_port(port)
    return process


async def start_node(master: str, segment: str) -> asyncio.subprocess.Process:
    """Starts a process that owns a segment of the store."""
    port = free_port()
    process = await start(
        "mooncake_client", f"--master_server_address={master}", "--host=127.0.0.1",
        "--metadata_server=P2PHANDSHAKE", "--protocol=tcp",
        f"--global_segment_size={segment}", "--local_buffer_size=16MB", f"--port={port}",
    )  # fmt: skip
    await wait_for_port(port)
    return process


@dataclass(slots=True)
class Running:
    """A started pair; `master` is what clients are given."""

    master: str
    master_process: asyncio.subprocess.Process
    node_process: asyncio.subprocess.Process

    async def restart_master(self) -> None:
        """Kills the master and starts an empty one at the same address."""
        await kill(self.master_process)
        self.master_process = await start_master(int(self.master.rpartition(":")[2]))


@contextlib.asynccontextmanager
async def mooncake_store(segment: str = "64 MB") -> AsyncIterator[Running]:
    """Starts a master and a node; kills both at the end."""
    port = free_port()
    master = f"127.0.0.1:{port}"
    running = Running(master, await start_master(port), await start_node(master, segment))
    try:
        yield running
    finally:
        await kill(running.node_process)
        await kill(running.master_process)
