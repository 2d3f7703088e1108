"""The whole stack, started as a user starts it, for tests that speak only HTTP and the bus."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from k3ctl.main import main as k3
from k3ctl.stack.state import StackState, read_state
from k3wire.bus.nats_bus import NatsBus
from k3wire.lifeline import die_with_parent
from k3wire.messages.control import Heartbeat
from k3wire.service.directory import Directory

START_S = 120.0


@dataclass(frozen=True, slots=True)
class Stack:
    """A running stack.

    Attributes:
        folder: of its state and logs.
        state: as it was when it became ready.
        process: the supervisor.
    """

    folder: Path
    state: StackState
    process: "subprocess.Popen[str]"

    @property
    def url(self) -> str:
        return self.state.gateway_url

    @property
    def checkpoint(self) -> Path:
        return Path(self.state.checkpoint)

    def now(self) -> StackState:
        """The state as it is now."""
        found = read_state(self.folder)
        assert found is not None, "the stack has ended"
        return found

    def pid(self, role: str) -> int:
        """Process id of the only worker of a role, 0 while there is none."""
        return next(p.pid for p in self.now().processes if p.role == role)


def make_checkpoint(folder: Path) -> Path:
    """Makes the small random checkpoint, as `k3 make-checkpoint` does."""
    # In this process: another one would spend seconds on loading torch.
    assert k3(["make-checkpoint", "--size", "micro", "--seed", "0", "--out", str(folder)]) == 0
    return folder


@contextlib.contextmanager
def running_stack(
    folder: Path, checkpoint: Path, *arguments: str, **variables: str
) -> Generator[Stack, None, None]:
    """Starts `k3 up` and ends it at once, as two signals do."""
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("K3_")},
        "K3_UP_FOLDER": str(folder),
        "K3_FETCHER_ALLOWED_NETWORKS": "127.0.0.0/8",
        "K3_LOG_LEVEL": "INFO",
        **variables,
    }
    command = [sys.executable, "-m", "k3ctl.main", "up", "--json"]
    folder.mkdir(parents=True, exist_ok=True)
    log_path = folder / "up.log"
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [*command, "--checkpoint", str(checkpoint), *arguments],
            env=environment, stdout=subprocess.PIPE, stderr=log, text=True,
            preexec_fn=die_with_parent(os.getpid()),
        )  # fmt: skip
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, log_path.read_text()
        yield Stack(folder, msgspec.json.decode(line, type=StackState), process)
    finally:
        # Two of a kind might be taken for one.
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        process.stdout.close()


class Api:
    """An HTTP client of a stack."""

    def __init__(self, stack: Stack, session: aiohttp.ClientSession) -> None:
        self.stack = stack
        self.session = session

    def body(self, content: Any, **fields: Any) -> dict[str, Any]:
        """A deterministic request; `content` is a user message's."""
        return {
            "model": self.stack.state.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_completion_tokens": 12,
            "reasoning_effort": "low",
            **fields,
        }

    async def post(self, body: Any) -> tuple[int, dict[str, Any]]:
        """Asks for a whole answer."""
        url = f"{self.stack.url}/v1/chat/completions"
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        async with self.session.post(url, data=data, headers=headers) as response:
            return response.status, await response.json(content_type=None)

    async def message(self, body: dict[str, Any]) -> dict[str, Any]:
        """The assistant message of a whole answer."""
        status, answer = await self.post(body)
        assert status == 200, answer
        return answer["choices"][0]["message"]

    async def stream(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All events of a streamed answer."""
        url = f"{self.stack.url}/v1/chat/completions"
        async with self.session.post(url, json=body | {"stream": True}) as response:
            assert response.status == 200, await response.text()
            lines = [line async for line in response.content if line.startswith(b"data: ")]
        assert lines[-1].strip() == b"data: [DONE]"
        return [json.loads(line[6:]) for line in lines[:-1]]


@contextlib.asynccontextmanager
async def api(stack: Stack) -> AsyncGenerator[Api, None]:
    """Opens a client."""
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield Api(stack, session)


@contextlib.asynccontextmanager
async def watch(stack: Stack) -> AsyncGenerator[Directory, None]:
    """Follows the workers' heartbeats."""
    bus = await NatsBus.connect(stack.state.nats_url, "test")
    directory = Directory()
    await directory.follow(bus)
    try:
        yield directory
    finally:
        await bus.close()


def only(directory: Directory, role: str) -> Heartbeat | None:
    """The beat of the only worker of a role."""
    return next((beat for beat in directory.all() if beat.role == role), None)


async def until(condition: Any, within_s: float) -> None:
    """Waits for something that another process does; fails past the bound."""
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        await asyncio.sleep(0.01)
