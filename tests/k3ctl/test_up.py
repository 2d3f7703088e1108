"""`k3 up` as an operator meets it: the whole stack, with the scripted engine."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from support.stack import START_S, Stack, api, make_checkpoint, only, running_stack, until, watch

from k3ctl.stack.state import family, is_running, read_state

pytestmark = pytest.mark.slow

MAX_RESIDENT_BYTES = 2_500_000_000
ROLES = ("gateway", "fetcher", "preprocessor", "encoder", "prefill", "decode")
INFRASTRUCTURE = ("nats", "redis", "mooncake", "mooncake-store")
SCRIPT = '{"match": "weather", "text": "sunny"}\n{"match": "", "text": "no idea"}\n'


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "micro")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "answers.jsonl"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def stack(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, script: Path
) -> Generator[Stack, None, None]:
    folder = tmp_path_factory.mktemp("run")
    with running_stack(
        folder, checkpoint, "--engine", "scripted", "--script", str(script)
    ) as running:
        yield running


def k3(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {k: v for k, v in os.environ.items() if not k.startswith("K3_")}
    return subprocess.run(
        [sys.executable, "-m", "k3ctl.main", *arguments],
        env=environment | {"K3_UP_FOLDER": str(folder)},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_status_lists_every_process_with_what_it_says_of_itself(stack: Stack) -> None:
    found = json.loads(k3(stack.folder, "status", "--json").stdout)
    workers = {row["role"]: row for row in found["workers"]}
    for role in ROLES:
        row = workers[role]
        assert row["ready"] is True
        assert row["id"].startswith(f"{role}-")
        assert row["epoch"] > 0
        assert row["load"]["num_running"] == 0
        assert is_running(row["pid"])
        assert row["rss_bytes"] > 10_000_000
    assert set(INFRASTRUCTURE) < set(workers)
    assert sum(row["rss_bytes"] for row in found["workers"]) < found["rss_bytes"]
    assert found["rss_bytes"] < MAX_RESIDENT_BYTES
    table = k3(stack.folder, "status").stdout
    assert all(role in table for role in ROLES)


def test_a_second_stack_in_the_same_folder_is_refused(stack: Stack) -> None:
    refused = k3(stack.folder, "up", "--checkpoint", str(stack.checkpoint))
    assert refused.returncode == 1
    assert str(stack.process.pid) in refused.stderr


def test_an_answer_comes_with_its_waterfall_and_leaves_a_trace(stack: Stack) -> None:
    asked = k3(stack.folder, "ask", "how is the weather?")
    assert asked.returncode == 0, asked.stderr
    assert "sunny" in asked.stdout
    request_id = asked.stdout.split()[-1]
    traced = k3(stack.folder, "trace", request_id)
    assert traced.returncode == 0, traced.stderr
    for stage in ("gateway", "prefill", "decode"):
        assert stage in asked.stdout
        assert stage in traced.stdout
    streamed = k3(stack.folder, "ask", "how is the weather?", "--stream")
    assert "sunny" in streamed.stdout


@pytest.mark.parametrize("role", ROLES)
async def test_after_a_worker_was_killed_the_next_request_works(stack: Stack, role: str) -> None:
    async with watch(stack) as directory, api(stack) as client:
        await until(lambda: only(directory, role) is not None, 5)
        before = stack.pid(role)
        os.kill(before, signal.SIGKILL)
        if role == "gateway":
            # Nobody can ask while it is away; it comes back at the same address.
            await until(lambda: stack.pid(role) not in (0, before), 20)
            beat = None
            while beat is None or beat.pid == before or not beat.is_ready:
                await asyncio.sleep(0.05)
                beat = only(directory, role)
            assert beat.endpoint == stack.url
        message = await client.message(client.body("how is the weather?"))
        assert "sunny" in str(message)
    await until(lambda: stack.pid(role) not in (0, before), 20)
    restarted = next(p for p in stack.now().processes if p.role == role)
    assert restarted.num_restarts == 1
    assert restarted.exit_code == -signal.SIGKILL


@pytest.mark.parametrize("role", INFRASTRUCTURE)
async def test_infrastructure_that_was_killed_comes_back_where_it_was(
    stack: Stack, role: str
) -> None:
    before = stack.pid(role)
    os.kill(before, signal.SIGKILL)
    await until(lambda: stack.pid(role) not in (0, before), 10)
    async with watch(stack) as directory, api(stack) as client:
        # Workers find the bus again by themselves.
        await until(lambda: all(only(directory, name) for name in ROLES), 10)
        message = await client.message(client.body("how is the weather?"))
        assert "sunny" in str(message)


async def test_a_stack_whose_supervisor_was_killed_leaves_no_process(
    tmp_path: Path, checkpoint: Path, script: Path
) -> None:
    arguments = ("--engine", "scripted", "--script", str(script), "--only", "preprocessor")
    with running_stack(tmp_path, checkpoint, *arguments) as stack:
        below = family(stack.process.pid) - {stack.process.pid}
        # NATS, Redis, Mooncake's two, and the preprocessor with its sandboxes.
        assert len(below) >= 5
        stack.process.kill()
        stack.process.wait(10)
        await until(lambda: not any(map(is_running, below)), 5)
    assert read_state(tmp_path) is None


async def test_a_stop_ends_every_process_and_says_success(
    tmp_path: Path, checkpoint: Path, script: Path
) -> None:
    arguments = ("--engine", "scripted", "--script", str(script), "--only", "fetcher")
    with running_stack(tmp_path, checkpoint, *arguments) as stack:
        below = family(stack.process.pid) - {stack.process.pid}
        assert {p.role for p in stack.state.processes} >= {"fetcher", "nats", "redis"}
        assert not any(p.role == "gateway" for p in stack.state.processes)
        stack.process.send_signal(signal.SIGINT)
        assert stack.process.wait(40) == 0
        assert not any(map(is_running, below))
        log = (tmp_path / "fetcher-0.log").read_text()
    assert "draining" in log
    assert log.rstrip().splitlines()[-1].endswith("stopped")


def test_a_port_that_somebody_else_has_is_an_error_that_names_the_process(
    tmp_path: Path, checkpoint: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("K3_")},
            "K3_UP_FOLDER": str(tmp_path),
            "K3_UP_REDIS_PORT": str(taken.getsockname()[1]),
        }
        ended = subprocess.run(
            [sys.executable, "-m", "k3ctl.main", "up", "--checkpoint", str(checkpoint)],
            env=environment, capture_output=True, text=True, check=False, timeout=START_S,
        )  # fmt: skip
    assert ended.returncode == 1
    assert "redis ended" in ended.stderr
    assert read_state(tmp_path) is None
