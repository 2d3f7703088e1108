"""Pictures while a part of the stack stops, freezes, forgets or dies in the middle of a request.

Whatever happens: the request under way gets its right answer, so does the next one, and the tiers
work again by themselves.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Generator, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.album import Asked, ask, hang, path_of, photograph, question
from support.picture_host import Held, PictureHost, answer, picture_host
from support.stack import Api, Stack, running_stack, until, watch

from k3wire.messages.control import Heartbeat
from k3wire.service.directory import Directory

pytestmark = pytest.mark.slow

HEAL_S = 60.0
NUMBERS = count(0, 10)
"""Pictures of their own for each test."""


@pytest.fixture(scope="module")
def fault_stack(
    tmp_path_factory: pytest.TempPathFactory, micro_checkpoint: Path
) -> Generator[Stack, None, None]:
    folder = tmp_path_factory.mktemp("faults")
    with running_stack(folder, micro_checkpoint, "--workers", "encoder=2") as running:
        yield running


@dataclass
class Scene:
    """The stack, a picture host, a client, and pictures that nobody has seen."""

    stack: Stack
    host: PictureHost
    client: Api
    directory: Directory
    salts: Iterator[int]

    def new(self, number: int = 4) -> list[int]:
        first = next(NUMBERS)
        numbers = list(range(first, first + number))
        hang(self.host, numbers)
        return numbers

    async def ask(self, numbers: list[int]) -> Asked:
        """Asks with a prefix of its own, so that every picture is wanted from L1 to L3."""
        return await ask(self.client, [question(self.host, numbers)], f"s{next(self.salts)}")

    def start(self, numbers: list[int]) -> "asyncio.Task[tuple[int, dict[str, Any]]]":
        """Begins to ask; the answer may be an error."""
        body = self.client.body(
            None,
            max_completion_tokens=6,
            messages=[question(self.host, numbers)],
            cache_salt=f"s{next(self.salts)}",
        )
        return asyncio.get_running_loop().create_task(self.client.post(body))

    async def heals(self, numbers: list[int], wanted: Any) -> Asked:
        """Asks until an answer is as wanted; every answer on the way is right."""
        first = await self.ask(numbers)
        async with asyncio.timeout(HEAL_S):
            while not wanted(found := await self.ask(numbers)):
                assert found.text == first.text
                await asyncio.sleep(0.1)
        return found


@pytest.fixture
async def scene(fault_stack: Stack) -> AsyncIterator[Scene]:
    timeout = aiohttp.ClientTimeout(total=110)
    async with (
        picture_host() as host,
        watch(fault_stack) as directory,
        aiohttp.ClientSession(timeout=timeout) as session,
    ):
        client = Api(fault_stack, session)
        salts = count(next(NUMBERS) * 1000)
        found = Scene(fault_stack, host, client, directory, salts)
        await found.ask(found.new(1))
        yield found


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def hold_last(scene: Scene, numbers: list[int]) -> Held:
    """Has the last picture's download wait for the test."""
    data = answer(photograph(numbers[-1]), Cache_Control="max-age=3600")
    held = scene.host.answers[path_of(numbers[-1])] = Held(data)
    return held


async def kill_in_the_middle(
    scene: Scene, numbers: list[int], role: str
) -> tuple[int, dict[str, Any]]:
    """Kills a process while a request waits for its last picture; its pid, and the answer."""
    held = hold_last(scene, numbers)
    running = scene.start(numbers)
    await held.asked.wait()
    pid = scene.stack.pid(role)
    os.kill(pid, signal.SIGKILL)
    held.go.set()
    status, body = await running
    assert status == 200, body
    return pid, body


async def test_redis_stopped_in_the_middle_costs_no_answer_and_is_filled_again(
    scene: Scene,
) -> None:
    numbers = scene.new()
    pid, body = await kill_in_the_middle(scene, numbers, "redis")
    await until(lambda: scene.stack.pid("redis") not in (0, pid), HEAL_S)
    hang(scene.host, numbers)
    later = await scene.heals(numbers, lambda found: found.num_made("L1") == 0)
    assert later.text == Asked(body).text
    await scene.heals(scene.new(), lambda found: found.num_made("L1") == 0)


async def test_a_frozen_redis_costs_no_answer_and_is_used_again(scene: Scene) -> None:
    numbers, later = scene.new(), scene.new()
    held = hold_last(scene, numbers)
    running = scene.start(numbers)
    await held.asked.wait()
    with frozen(scene.stack.pid("redis")):
        held.go.set()
        status, body = await running
        assert status == 200, body
        during = await scene.ask(later)
    hang(scene.host, numbers)
    after = await scene.heals(numbers, lambda found: found.num_made("L1") == 0)
    assert after.text == Asked(body).text
    after = await scene.heals(later, lambda found: found.num_made("L1") == 0)
    assert after.text == during.text


async def test_a_flushed_redis_is_filled_again(scene: Scene) -> None:
    numbers = scene.new()
    before = await scene.ask(numbers)
    reader, writer = await asyncio.open_connection(*_address(scene.stack.state.redis_url))
    writer.write(b"FLUSHALL\r\n")
    assert (await reader.readline()).strip() == b"+OK"
    writer.close()
    num_asked = len(scene.host.asked)
    after = await scene.ask(numbers)
    assert after.text == before.text
    # It forgot the addresses: they are asked again, and nothing is decoded or encoded for it.
    assert len(scene.host.asked) - num_asked == len(numbers)
    assert (after.num_decodes, after.num_encodes) == (0, 0)
    again = await scene.ask(numbers)
    assert again.num_made("L1") == 0


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("redis://").partition("/")[0].partition(":")
    return host, int(port)


async def test_the_store_gone_in_the_middle_costs_no_answer_and_shares_again(
    scene: Scene,
) -> None:
    numbers = scene.new()
    pid, body = await kill_in_the_middle(scene, numbers, "mooncake")
    later = await scene.ask(numbers)
    assert later.text == Asked(body).text
    await until(lambda: scene.stack.pid("mooncake") not in (0, pid), HEAL_S)
    async with asyncio.timeout(HEAL_S):
        while not await _is_shared(scene):
            continue


async def _is_shared(scene: Scene) -> bool:
    """Whether one encoder finds what the other one made; half the requests go to each."""
    numbers = scene.new(1)
    details = {(await scene.ask(numbers)).lines["L3"]["detail"] for _ in range(6)}
    return "shared" in details


def _busy(scene: Scene, role: str) -> Heartbeat | None:
    beats = (b for b in scene.directory.all() if b.role == role and b.load.num_running)
    return next(beats, None)


@pytest.mark.parametrize("role", ["encoder", "preprocessor"])
async def test_a_worker_killed_in_the_middle_costs_no_answer(scene: Scene, role: str) -> None:
    numbers = scene.new()
    preprocessor = scene.stack.pid("preprocessor")
    with frozen(preprocessor):
        running = scene.start(numbers)
        # An encoder has asked for pictures that do not come.
        await until(lambda: _busy(scene, "encoder"), HEAL_S)
        beat = _busy(scene, "encoder")
        assert beat is not None
        pid = beat.pid if role == "encoder" else preprocessor
        os.kill(pid, signal.SIGKILL)
    status, body = await running
    assert status == 200, body

    def is_whole() -> bool:
        pids = {p.pid for p in scene.stack.now().processes if p.role == role}
        ready = {beat.pid for beat in scene.directory.all() if beat.is_ready}
        return 0 not in pids and pid not in pids and pids <= ready

    await until(is_whole, HEAL_S)
    after = await scene.ask(numbers)
    assert after.text == Asked(body).text
    assert after.num_made("L1") == 0
    assert (await scene.ask(scene.new())).num_encodes == len(numbers)
