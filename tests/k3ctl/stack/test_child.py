"""One supervised process: real ones, as small as they get."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from k3ctl.stack.child import Child, Patience
from k3ctl.stack.state import is_running

QUICK = Patience(first_backoff_s=0.001, last_backoff_s=0.002, max_ends=4, window_s=60)
SLEEPER = "import signal; signal.pause()"
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('deaf', flush=True); signal.pause()"
)
HOPELESS = """
import atexit, sys
atexit.register(print, "12:00:00.000 INFO    child-0      stopped", file=sys.stderr)
raise SystemExit("no such model")
"""


class Watched:
    """A child whose changes can be awaited."""

    def __init__(self, folder: Path, script: str, patience: Patience = QUICK) -> None:
        self._changed = asyncio.Event()
        self.told: list[tuple[str, int, str]] = []
        self.child = Child(
            name="child-0",
            role="child",
            command=[sys.executable, "-S", "-c", script],
            environment=dict(os.environ),
            log_path=folder / "child-0.log",
            on_change=self._changed.set,
            on_trouble=self._hear_trouble,
            patience=patience,
        )

    def _hear_trouble(self, child: Child) -> None:
        self.told.append((child.phase, child.num_ends, child.why_it_ended()))

    async def until(self, phase: str, num_restarts: int = 0) -> None:
        async with asyncio.timeout(10):
            while (self.child.phase, self.child.num_restarts) != (phase, num_restarts):
                self._changed.clear()
                await self._changed.wait()

    async def until_logged(self, text: str) -> None:
        async with asyncio.timeout(10):
            while text not in self.child.log_tail():  # noqa: ASYNC110 - a file has no event
                await asyncio.sleep(0.01)


@pytest.fixture
async def group() -> AsyncIterator[asyncio.TaskGroup]:
    async with asyncio.TaskGroup() as group:
        yield group


async def test_a_killed_child_is_started_again(tmp_path: Path, group: asyncio.TaskGroup) -> None:
    watched = Watched(tmp_path, SLEEPER)
    child = watched.child
    await child.start()
    first = child.pid
    group.create_task(child.keep_running())
    os.kill(first, signal.SIGKILL)
    await watched.until("running", num_restarts=1)
    assert child.exit_code == -signal.SIGKILL
    assert child.why_it_ended() == "killed by SIGKILL"
    assert watched.told == []
    assert child.pid not in (0, first)
    assert is_running(child.pid)
    await child.stop(5)
    assert child.pid == 0


async def test_a_child_that_refuses_its_settings_is_not_asked_again(
    tmp_path: Path, group: asyncio.TaskGroup
) -> None:
    watched = Watched(tmp_path, "raise SystemExit(2)")
    child = watched.child
    await child.start()
    keeper = group.create_task(child.keep_running())
    await watched.until("crash loop")
    assert (child.exit_code, child.num_restarts) == (2, 0)
    async with asyncio.timeout(5):
        await keeper


async def test_a_child_that_cannot_run_is_given_up(
    tmp_path: Path, group: asyncio.TaskGroup
) -> None:
    watched = Watched(tmp_path, HOPELESS)
    child = watched.child
    await child.start()
    keeper = group.create_task(child.keep_running())
    await watched.until("crash loop", num_restarts=3)
    async with asyncio.timeout(5):
        await keeper
    assert child.exit_code == 1
    assert child.log_tail().count("no such model") == 4
    why = "exit code 1, no such model"
    assert watched.told == [("backing off", 3, why), ("crash loop", 4, why)]
    await child.stop(1)
    assert child.phase == "crash loop"


async def test_a_program_that_vanished_is_given_up_like_one_that_ends(
    tmp_path: Path, group: asyncio.TaskGroup
) -> None:
    watched = Watched(tmp_path, SLEEPER)
    program = tmp_path / "python"
    program.symlink_to(sys.executable)
    watched.child.command = [str(program), *watched.child.command[1:]]
    await watched.child.start()
    group.create_task(watched.child.keep_running())
    program.unlink()
    os.kill(watched.child.pid, signal.SIGKILL)
    await watched.until("crash loop", num_restarts=3)


async def test_ends_long_ago_are_forgiven(tmp_path: Path, group: asyncio.TaskGroup) -> None:
    forgiving = Patience(first_backoff_s=0.001, last_backoff_s=0.002, max_ends=2, window_s=0)
    watched = Watched(tmp_path, "pass", forgiving)
    await watched.child.start()
    group.create_task(watched.child.keep_running())
    await watched.until("running", num_restarts=5)
    await watched.child.stop(5)


async def test_a_stop_during_the_pause_ends_the_pause(
    tmp_path: Path, group: asyncio.TaskGroup
) -> None:
    slow = Patience(first_backoff_s=600, last_backoff_s=600, max_ends=9)
    watched = Watched(tmp_path, "pass", slow)
    await watched.child.start()
    keeper = group.create_task(watched.child.keep_running())
    await watched.until("backing off")
    async with asyncio.timeout(5):
        await watched.child.stop(5)
        await keeper
    assert watched.child.phase == "stopped"
    assert watched.child.num_restarts == 0


async def test_a_child_that_does_not_listen_is_killed_after_its_grace(tmp_path: Path) -> None:
    watched = Watched(tmp_path, STUBBORN)
    child = watched.child
    await child.start()
    await watched.until_logged("deaf")
    pid = child.pid
    async with asyncio.timeout(10):
        await child.stop(0.05)
        await child.stop(0.05)
    assert not is_running(pid)


PARENT = """
import asyncio, os, sys
from pathlib import Path
from k3ctl.stack.child import Child
async def main():
    script = "import signal; signal.pause()"
    children = [
        Child(str(n), "child", [sys.executable, "-S", "-c", script], dict(os.environ),
              Path(sys.argv[1]) / "log", lambda: None)
        for n in range(3)
    ]
    for child in children:
        await child.start()
    print(*[child.pid for child in children], flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_children_of_a_parent_that_was_killed_do_not_survive_it(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    async with asyncio.timeout(20):
        pids = [int(pid) for pid in (await parent.stdout.readline()).split()]
        assert len(pids) == 3
        assert all(map(is_running, pids))
        parent.kill()
        await parent.wait()
        while any(map(is_running, pids)):  # noqa: ASYNC110 - they are nobody's children now
            await asyncio.sleep(0.005)
