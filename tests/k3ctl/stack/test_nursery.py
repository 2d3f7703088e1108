"""Workers forked from one process: they are processes of their own, and die with it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from k3ctl.stack.nursery import Forked, Nursery, NurseryEnded
from k3ctl.stack.state import is_running, resident_bytes

WORKER = """
import os, signal, sys
print("loaded" if "shared" in sys.modules else "alone", os.environ["NAME"], sys.argv, flush=True)
print("leads" if os.getsid(0) == os.getpid() else "follows", flush=True)
if os.environ["NAME"] == "brief":
    sys.exit(3)
signal.pause()
"""


@pytest.fixture
async def nursery(tmp_path: Path) -> AsyncIterator[Nursery]:
    (tmp_path / "shared.py").write_text("KEPT = bytearray(b'x' * 50_000_000)\n")
    (tmp_path / "worker.py").write_text(WORKER)
    environment = dict(os.environ) | {"PYTHONPATH": str(tmp_path)}
    opened = Nursery(["shared"], environment, tmp_path / "nursery.log")
    await opened.open()
    yield opened
    await opened.close()
    await opened.close()
    assert opened.pid == 0


async def fork(nursery: Nursery, folder: Path, name: str) -> Forked:
    async with asyncio.timeout(20):
        return await nursery.fork("worker", {"NAME": name}, folder / f"{name}.log")


async def logged(folder: Path, name: str, text: str) -> None:
    path = folder / f"{name}.log"
    async with asyncio.timeout(20):
        while not path.exists() or text not in path.read_text():  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.01)


async def test_a_fork_has_what_was_loaded_its_own_environment_log_and_session(
    nursery: Nursery, tmp_path: Path
) -> None:
    one, two = await asyncio.gather(*(fork(nursery, tmp_path, n) for n in ("one", "two")))
    for name, worker in (("one", one), ("two", two)):
        await logged(tmp_path, name, "leads")
        log = (tmp_path / f"{name}.log").read_text()
        assert log.startswith(f"loaded {name} ['{tmp_path}/worker.py']")
        assert is_running(worker.pid)
        assert worker.returncode is None
    assert len({one.pid, two.pid, nursery.pid, os.getpid()}) == 4


async def test_what_forks_share_is_counted_once(nursery: Nursery, tmp_path: Path) -> None:
    await asyncio.gather(*(fork(nursery, tmp_path, str(n)) for n in range(4)))
    await asyncio.gather(*(logged(tmp_path, str(n), "leads") for n in range(4)))
    assert 50e6 < resident_bytes(nursery.pid) < 2 * 50e6


async def test_how_each_ended_is_told(nursery: Nursery, tmp_path: Path) -> None:
    brief = await fork(nursery, tmp_path, "brief")
    asked = await fork(nursery, tmp_path, "asked")
    killed = await fork(nursery, tmp_path, "killed")
    asked.terminate()
    killed.kill()
    async with asyncio.timeout(20):
        codes = [await worker.wait() for worker in (brief, asked, killed)]
    assert codes == [3, -signal.SIGTERM, -signal.SIGKILL]
    assert not any(is_running(worker.pid) for worker in (brief, asked, killed))
    for ended in (asked.terminate, killed.kill):
        with pytest.raises(ProcessLookupError):
            ended()


async def test_workers_die_with_the_nursery_and_the_next_one_opens_it_again(
    nursery: Nursery, tmp_path: Path
) -> None:
    first, gone = await fork(nursery, tmp_path, "first"), nursery.pid
    os.kill(gone, signal.SIGKILL)
    async with asyncio.timeout(20):
        assert await first.wait() == -signal.SIGKILL
    async with asyncio.timeout(20):
        while is_running(first.pid):  # noqa: ASYNC110 - nobody tells of a process that is no child
            await asyncio.sleep(0.01)
    second = await fork(nursery, tmp_path, "second")
    assert nursery.pid not in (0, gone)
    assert is_running(second.pid)


async def test_a_nursery_that_cannot_load_fails_the_start_and_says_where_to_look(
    tmp_path: Path,
) -> None:
    nursery = Nursery(["no_such_module"], dict(os.environ), tmp_path / "nursery.log")
    with pytest.raises(NurseryEnded, match=r"nursery\.log"):
        await fork(nursery, tmp_path, "never")
    assert "no_such_module" in (tmp_path / "nursery.log").read_text()
    await nursery.close()


async def test_a_nursery_that_is_loading_still_is_closed_at_once(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import signal\nsignal.pause()\n")
    environment = dict(os.environ) | {"PYTHONPATH": str(tmp_path)}
    nursery = Nursery(["endless"], environment, tmp_path / "nursery.log")
    await nursery.open()
    async with asyncio.timeout(5):
        await nursery.close()
    assert nursery.pid == 0
