"""The sandbox with real processes, real bombs and real kills."""

import asyncio
import functools
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from support.hostile_images import Case, all_cases
from support.pictures import encode, gradient

from k3ctl.stack.state import is_running
from k3text.images.config import ProcessorConfig
from k3text.images.header import DEFAULT_MEDIA_TYPES, OPTIONAL_MEDIA_TYPES, ImageLimits
from k3text.images.processor import cut
from k3text.images.sandbox import Sandbox, SandboxConfig
from k3text.images.sandbox_process import ProcessLimits, SandboxProcess
from k3wire.errors import (
    DeadlineExceeded,
    ImageError,
    ImageParseError,
    ImageTooLarge,
    K3Error,
    ShuttingDown,
    SlowDown,
    WorkerLost,
)

K3 = ProcessorConfig()
ALL = ImageLimits(media_types=DEFAULT_MEDIA_TYPES | OPTIONAL_MEDIA_TYPES)
SMALL = encode(gradient(60, 40), "PNG")
WAIT_S = 10.0


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    async with Sandbox(K3, ALL, SandboxConfig(num_workers=1)) as pool:
        yield pool


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop turn until something holds."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def code_of(call: Awaitable[object]) -> str:
    try:
        await call
    except K3Error as error:
        return error.code
    return ""


@functools.cache
def slow_image() -> bytes:
    """A small progressive JPEG that repeats its last scan until decoding takes a minute."""
    flat = np.full((1500, 1500, 3), 90, np.uint8)
    jpeg = encode(flat, "JPEG", progressive=True)
    last = jpeg.rindex(b"\xff\xda")
    return jpeg[:last] + jpeg[last:-2] * 25_000 + b"\xff\xd9"


async def test_pre_08_every_hostile_file_gives_its_code_and_no_worker_dies(
    sandbox: Sandbox,
) -> None:
    before = sandbox.pids
    wrong: list[tuple[str, str]] = []
    for case in all_cases():
        found = await code_of(sandbox.cut(case.data))
        if found != case.code:
            wrong.append((case.name, found))
    assert wrong == []
    assert sandbox.pids == before


@pytest.mark.parametrize("case", [c for c in all_cases() if not c.code][::20], ids=lambda case: case.name)  # fmt: skip
async def test_the_sandbox_gives_the_same_bytes_as_this_process(
    sandbox: Sandbox, case: Case
) -> None:
    found = await sandbox.cut(case.data)
    here = cut(case.data, K3, ALL)
    assert found.patched.grid_thw == here.grid_thw
    assert found.patched.num_tokens == here.num_tokens
    np.testing.assert_array_equal(found.patched.pixels, here.pixels)


async def test_a_large_image_leaves_nothing_of_itself_to_the_next(sandbox: Sandbox) -> None:
    large = encode(np.full((1500, 1500, 3), 200, np.uint8), "BMP")
    assert (await sandbox.cut(large)).patched.num_tokens == 54 * 54
    found = await sandbox.cut(SMALL)
    np.testing.assert_array_equal(found.patched.pixels, cut(SMALL, K3).pixels)


async def test_pre_02_an_image_that_takes_too_much_processor_time_is_an_image_error() -> None:
    limits = ProcessLimits(cpu_s=1, wall_s=30)
    async with Sandbox(K3, ImageLimits(), SandboxConfig(1, 8, limits)) as sandbox:
        (before,) = sandbox.pids
        with pytest.raises(ImageParseError) as raised:
            await sandbox.cut(slow_image())
        assert "too long" in raised.value.message
        await sandbox.cut(SMALL)
        assert sandbox.pids != [before]


async def test_the_processor_limit_is_per_image_not_per_worker() -> None:
    # One image may take a second; twelve of a fifth of one must all pass in one process.
    limits = ProcessLimits(cpu_s=1, wall_s=30)
    image = encode(gradient(1600, 1600), "PNG")
    async with Sandbox(K3, ImageLimits(), SandboxConfig(1, 8, limits)) as sandbox:
        before = sandbox.pids
        for _ in range(12):
            await sandbox.cut(image)
        assert sandbox.pids == before


async def test_pre_02_an_image_that_takes_too_much_memory_is_too_large_and_kills_nobody() -> None:
    limits = ProcessLimits(memory_bytes=64 * 1024 * 1024)
    image = encode(np.zeros((6000, 6000), np.uint8), "PNG")
    async with Sandbox(K3, ImageLimits(), SandboxConfig(1, 8, limits)) as sandbox:
        before = sandbox.pids
        with pytest.raises(ImageTooLarge):
            await sandbox.cut(image)
        await sandbox.cut(SMALL)
        assert sandbox.pids == before


async def test_pre_02_a_worker_that_hangs_is_killed_at_its_time_and_replaced() -> None:
    limits = ProcessLimits(cpu_s=60, wall_s=0.3)
    async with Sandbox(K3, ImageLimits(), SandboxConfig(1, 8, limits)) as sandbox:
        (before,) = sandbox.pids
        os.kill(before, signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded):
            await sandbox.cut(SMALL)
        await until(lambda: len(sandbox.pids) == 1)
        assert sandbox.pids != [before]
        await sandbox.cut(SMALL)


async def test_a_worker_that_the_system_kills_is_replaced_and_the_image_may_be_retried(
    sandbox: Sandbox,
) -> None:
    (before,) = sandbox.pids
    call = asyncio.ensure_future(sandbox.cut(slow_image()))  # noqa: TID251
    await until(lambda: sandbox.num_running == 1)
    os.kill(before, signal.SIGKILL)
    with pytest.raises(WorkerLost):
        await call
    await sandbox.cut(SMALL)
    assert sandbox.pids != [before]


async def test_a_worker_killed_between_images_costs_nobody_an_error(sandbox: Sandbox) -> None:
    (before,) = sandbox.pids
    os.kill(before, signal.SIGKILL)
    await until(lambda: sandbox.pids == [])
    await sandbox.cut(SMALL)
    assert sandbox.pids != [before]


async def test_a_decoder_that_crashes_makes_an_image_error(sandbox: Sandbox) -> None:
    (before,) = sandbox.pids
    call = asyncio.ensure_future(sandbox.cut(slow_image()))  # noqa: TID251
    await until(lambda: sandbox.num_running == 1)
    os.kill(before, signal.SIGSEGV)
    with pytest.raises(ImageError):
        await call


async def test_more_images_than_may_wait_are_told_to_slow_down() -> None:
    async with Sandbox(K3, ImageLimits(), SandboxConfig(1, 2)) as sandbox:
        slow = slow_image()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(code_of(sandbox.cut(slow)))
            await until(lambda: sandbox.num_running == 1)
            waiting = [group.create_task(code_of(sandbox.cut(SMALL))) for _ in range(2)]
            await until(lambda: sandbox.num_waiting == 2)
            with pytest.raises(SlowDown) as raised:
                await sandbox.cut(SMALL)
            assert raised.value.retry_after_s
            running.cancel()
            assert [await task for task in waiting] == ["", ""]


async def test_pre_15_a_cancelled_image_that_waits_never_starts_and_frees_its_place() -> None:
    async with Sandbox(K3, ImageLimits(), SandboxConfig(1, 1)) as sandbox:
        before = sandbox.pids
        running = asyncio.ensure_future(sandbox.cut(encode(gradient(2000, 2000), "PNG")))  # noqa: TID251
        await until(lambda: sandbox.num_running == 1)
        waiting = asyncio.ensure_future(sandbox.cut(slow_image()))  # noqa: TID251
        await until(lambda: sandbox.num_waiting == 1)
        waiting.cancel()
        await until(lambda: sandbox.num_waiting == 0)
        assert (await sandbox.cut(SMALL)).patched.num_tokens == 6
        assert (await running).patched.num_tokens == 5184
        assert sandbox.pids == before


async def test_pre_15_cancelling_a_running_image_frees_its_processor(sandbox: Sandbox) -> None:
    (before,) = sandbox.pids
    running = asyncio.ensure_future(sandbox.cut(slow_image()))  # noqa: TID251
    await until(lambda: sandbox.num_running == 1)
    running.cancel()
    await until(lambda: sandbox.num_running == 0 and len(sandbox.pids) == 1)
    assert sandbox.pids != [before]
    await sandbox.cut(SMALL)


async def test_closing_ends_waiting_and_running_images_and_every_process() -> None:
    async with Sandbox(K3, ImageLimits(), SandboxConfig(1, 4)) as sandbox:
        (pid,) = sandbox.pids
        slow = slow_image()
        calls = [asyncio.ensure_future(sandbox.cut(slow)) for _ in range(3)]  # noqa: TID251
        await until(lambda: sandbox.num_running == 1 and sandbox.num_waiting == 2)
    for call in calls:
        with pytest.raises(ShuttingDown):
            await call
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(ShuttingDown):
        await sandbox.cut(SMALL)


async def test_images_are_cut_in_several_processes_at_once() -> None:
    async with Sandbox(K3, ImageLimits(), SandboxConfig(2, 8)) as sandbox:
        slow = slow_image()
        calls = [asyncio.ensure_future(sandbox.cut(slow)) for _ in range(2)]  # noqa: TID251
        await until(lambda: sandbox.num_running == 2)
        for call in calls:
            call.cancel()


async def test_a_worker_can_open_no_file_no_socket_and_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("K3_REDIS_URL", "redis://secret")
    process = SandboxProcess(K3, ImageLimits(), ProcessLimits())
    try:
        await process.start()
        folder = Path(f"/proc/{process.pid}")
        lines = (folder / "limits").read_text().splitlines()
        limits = {line[:25].strip(): line[25:].split()[:2] for line in lines}
        assert limits["Max open files"] == ["0", "0"]
        assert limits["Max processes"] == ["0", "0"]
        assert limits["Max file size"] == ["0", "0"]
        assert limits["Max core file size"] == ["0", "0"]
        assert limits["Max address space"][0] != "unlimited"
        assert b"K3_" not in (folder / "environ").read_bytes()
        targets = [os.readlink(path) for path in (folder / "fd").iterdir()]
        assert not any("socket" in target for target in targets)
    finally:
        await process.close()


async def test_a_sandbox_that_cannot_start_says_so_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(WorkerLost):
        async with Sandbox(K3, ImageLimits(), SandboxConfig(2, 8)):
            raise AssertionError("a sandbox without workers is no sandbox")


async def test_a_start_that_is_cancelled_leaves_no_process() -> None:
    sandbox = Sandbox(K3, ImageLimits(), SandboxConfig(2, 8))
    opening = asyncio.ensure_future(sandbox.__aenter__())  # noqa: TID251
    await until(lambda: len(sandbox.pids) == 2)
    pids = sandbox.pids
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


PARENT = """
import asyncio
from k3text.images.config import ProcessorConfig
from k3text.images.header import ImageLimits
from k3text.images.sandbox_process import ProcessLimits, SandboxProcess
async def main():
    process = SandboxProcess(ProcessorConfig(), ImageLimits(), ProcessLimits())
    await process.start()
    print(process.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_a_worker_that_hears_nothing_ends_with_its_service_all_the_same() -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    async with asyncio.timeout(2 * WAIT_S):
        pid = int(await parent.stdout.readline())
        # As good as one that decodes: it does not see that its input ends.
        os.kill(pid, signal.SIGSTOP)
        try:
            parent.kill()
            await parent.wait()
            await until(lambda: not is_running(pid))
        finally:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
