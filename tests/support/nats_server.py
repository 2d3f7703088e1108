"""A real NATS server on a free loopback port, for the length of a test."""

import asyncio
import contextlib
import json
import shutil
import sysconfig
from collections.abc import AsyncIterator
from pathlib import Path

START_S = 5.0


def nats_binary() -> str:
    """Finds the server: beside this Python, then on PATH."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    assert found, "nats-server is not installed; run make setup"
    return found


@contextlib.asynccontextmanager
async def nats_server(folder: Path, port: int = -1) -> AsyncIterator[str]:
    """Starts a server and gives its URL; kills it at the end.

    Args:
        folder: empty, for its ports file.
        port: fixed one, for a restart; -1 is a free one.
    """
    process = await asyncio.create_subprocess_exec(
        nats_binary(), "-a", "127.0.0.1", "-p", str(port), "--ports_file_dir", str(folder),
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        ports = folder / f"nats-server_{process.pid}.ports"
        async with asyncio.timeout(START_S):
            while not ports.exists() or not ports.read_text().strip():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        yield json.loads(ports.read_text())["nats"][0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
