"""What the measurements of the picture stages share: a stack, a picture host, the stages' counters."""

import asyncio
import io
import json
import os
import re
import signal
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from PIL import Image

from k3ctl.stack.plan import SERVICES
from k3ctl.stack.state import family
from k3wire.lifeline import die_with_parent

LISTENING = "0A"
"""State of a listening socket in /proc/net/tcp."""

METRICS_PATTERN = re.compile(r'k3_tier_lookups_total\{outcome="(\w+)",tier="(L\d)"\} ([\d.e+]+)')
MADE = ("miss", "bypass")
"""Outcomes after which a stage did its work."""


def jpeg(number: int, width: int, height: int) -> bytes:
    """A picture that no other number gives: coarse noise, smoothed, about as long as a photograph."""
    coarse = np.random.default_rng(number).integers(0, 256, (25, 32, 3), dtype=np.uint8)
    picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


@dataclass
class PictureHost:
    """A web server on loopback.

    Attributes:
        pictures: by number.
        num_asked: downloads by number.
    """

    pictures: dict[int, bytes] = field(default_factory=dict[int, bytes])
    num_asked: dict[int, int] = field(default_factory=dict[int, int])
    port: int = 0

    def url(self, number: int) -> str:
        return f"http://127.0.0.1:{self.port}/{number}.jpg"

    @property
    def num_downloads(self) -> int:
        return sum(self.num_asked.values())

    async def serve(self, request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        self.num_asked[number] = self.num_asked.get(number, 0) + 1
        return web.Response(
            body=self.pictures[number],
            content_type="image/jpeg",
            headers={"Cache-Control": "max-age=86400"},
        )


@asynccontextmanager
async def picture_host() -> AsyncIterator[PictureHost]:
    """Runs a server on a free port."""
    host = PictureHost()
    application = web.Application()
    application.router.add_get("/{number}.jpg", host.serve)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host.port = runner.addresses[0][1]
    try:
        yield host
    finally:
        await runner.cleanup()


@dataclass(frozen=True)
class Stack:
    """A running stack, and a client of it."""

    folder: Path
    url: str
    nats_url: str
    checkpoint: Path
    model: str
    session: aiohttp.ClientSession

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], **fields: Any
    ) -> tuple[int, dict[str, Any]]:
        """Asks for a whole, deterministic answer; gives its status and body."""
        body = {"model": self.model, "messages": messages, "temperature": 0, **fields}
        url = f"{self.url}/v1/chat/completions"
        async with self.session.post(url, json=body) as response:
            return response.status, await response.json(content_type=None)

    def processes(self) -> dict[str, tuple[str, int]]:
        """Role and process id by name, as they are now."""
        state = json.loads((self.folder / "state.json").read_bytes())
        return {each["name"]: (each["role"], each["pid"]) for each in state["processes"]}

    def cpu_s(self) -> float:
        """Processor time of all workers and what they started; figures of a busy machine need it."""
        pids = {
            member
            for role, pid in self.processes().values()
            if role in SERVICES
            for member in family(pid)
        }
        return sum(map(_cpu_s, pids))

    def made(self) -> dict[str, int]:
        """How often L1 to L3's stages did their work since their start, by tier."""
        found = {"L1": 0, "L2": 0, "L3": 0}
        owners = {"fetcher": "L1", "preprocessor": "L2", "encoder": "L3"}
        for role, pid in self.processes().values():
            if role in owners:
                for outcome, tier, value in METRICS_PATTERN.findall(metrics_of(pid)):
                    if tier == owners[role] and outcome in MADE:
                        found[tier] += int(float(value))
        return found


@asynccontextmanager
async def running_stack(folder: Path, *arguments: str, **variables: str) -> AsyncIterator[Stack]:
    """Starts `k3 up` on a small random checkpoint in a folder, and ends it with SIGTERM."""
    checkpoint = folder / "micro"
    if not checkpoint.exists():
        await _run("make-checkpoint", "--size", "micro", "--seed", "0", "--out", str(checkpoint))
    run_folder = Path(tempfile.mkdtemp(prefix="run-", dir=folder))
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("K3_")},
        "K3_UP_FOLDER": str(run_folder),
        "K3_FETCHER_ALLOWED_NETWORKS": "127.0.0.0/8",
        "K3_LOG_LEVEL": "WARNING",
        "K3_TRACE_DIR": "",
        **variables,
    }
    # Beside the folder, which the stack clears of logs when it starts.
    log_path = run_folder.with_suffix(".log")
    with log_path.open("w") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "k3ctl.main", "up", "--json", "--checkpoint", str(checkpoint),
            *arguments, env=environment, stdout=asyncio.subprocess.PIPE, stderr=log,
            preexec_fn=die_with_parent(os.getpid()),
        )  # fmt: skip
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise SystemExit(log_path.read_text())
        state = json.loads(line)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            yield Stack(
                folder=run_folder,
                url=state["gateway_url"],
                nats_url=state["nats_url"],
                checkpoint=checkpoint,
                model=state["model"],
                session=session,
            )
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


async def _run(*arguments: str) -> None:
    command = [sys.executable, "-m", "k3ctl.main", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    if await process.wait() != 0:
        raise SystemExit(f"k3 {arguments[0]} failed")


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def metrics_of(pid: int) -> str:
    """What a worker's metrics page says; its port is the one on which the page is.

    Raises:
        SystemExit: the process has no such page.
    """
    for port in _listening_ports(pid):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as page:
                return page.read().decode()
        except OSError:
            continue
    raise SystemExit(f"process {pid} shows no metrics")


def _listening_ports(pid: int) -> list[int]:
    inodes: set[str] = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return [
        int(row[1].rpartition(":")[2], 16)
        for row in rows
        if row[3] == LISTENING and row[9] in inodes
    ]
