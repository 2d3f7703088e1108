"""How a stack ends before it has begun, and what a person is told of a worker that keeps ending."""

import asyncio
import os
import sys
from pathlib import Path

from k3ctl.stack.child import Child, Patience
from k3ctl.stack.plan import StackPlan
from k3ctl.stack.settings import UpSettings
from k3ctl.stack.state import is_running
from k3ctl.stack.supervisor import Supervisor

DEAF = (
    "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('deaf', flush=True); signal.pause()"
)


def plan(folder: Path) -> StackPlan:
    return StackPlan(
        folder=folder,
        checkpoint=folder,
        settings=UpSettings(),
        environment=dict(os.environ),
        engine="scripted",
    )


async def test_a_stop_ends_a_start_where_it_is_and_the_second_ends_all_at_once(
    tmp_path: Path,
) -> None:
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if line.startswith(("starting", "stopping")):
            supervisor.interrupt()

    supervisor = Supervisor(plan(tmp_path), say)
    # As a gateway it gets half a minute after the first signal.
    command = [sys.executable, "-S", "-c", DEAF]
    log = tmp_path / "deaf.txt"
    deaf = Child("deaf", "gateway", command, dict(os.environ), log, lambda: None)
    supervisor.children.append(deaf)
    await deaf.start()
    pid = deaf.pid
    async with asyncio.timeout(5):
        while "deaf" not in deaf.log_tail():  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.01)
        await supervisor.run(lambda _: None)
    assert not is_running(pid)
    assert [line.split()[0] for line in said] == ["starting", "stopping:"]
    assert {child.role for child in supervisor.children} == {"gateway", "nats", "redis", "mooncake"}
    assert not any(child.pid for child in supervisor.children)


async def test_a_worker_that_keeps_ending_is_told_of_with_its_last_error(tmp_path: Path) -> None:
    said: list[str] = []
    supervisor = Supervisor(plan(tmp_path), said.append)
    command = [sys.executable, "-S", "-c", "raise SystemExit('no \\x1b[31mmodel')"]
    child = supervisor.add_child("prefill-0", "prefill", command, dict(os.environ))
    child.patience = Patience(first_backoff_s=0.001, last_backoff_s=0.001, max_ends=5)
    await child.start()
    async with asyncio.timeout(20):
        await child.keep_running()
    # It stayed down before the stack was ready, which is for the start to say.
    (line,) = said
    assert line.startswith("prefill-0 ended 3 times within a minute and is started again: ")
    assert "exit code 1, no \N{REPLACEMENT CHARACTER}[31mmodel" in line
    assert str(child.log_path) in line
