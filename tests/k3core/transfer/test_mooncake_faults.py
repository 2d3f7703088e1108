"""Mooncake when its parts die, freeze or come back: never a wrong answer, never a hang."""

import asyncio
import ctypes
import signal
import sys
import time
from pathlib import Path

import pytest
from support import mooncake

from k3core.transfer.base import PutOutcome, Region, Write
from k3core.transfer.mooncake import MooncakeStore, MooncakeTransferEngine
from k3wire.errors import TierUnavailable

SIZE = 256 * 1024

pytestmark = pytest.mark.slow

PEER = """
import asyncio, ctypes
from k3core.transfer.base import Region
from k3core.transfer.mooncake import MooncakeTransferEngine
async def main():
    engine = await MooncakeTransferEngine.open("127.0.0.1")
    data = (ctypes.c_uint8 * 65536)()
    await engine.register(Region(ctypes.addressof(data), 65536))
    print(engine.session, ctypes.addressof(data), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""

WRITER = """
import asyncio, ctypes, sys
from k3core.transfer.base import Region
from k3core.transfer.mooncake import MooncakeStore
async def main():
    store = MooncakeStore(sys.argv[1], "127.0.0.1")
    size = int(sys.argv[2])
    data = (ctypes.c_uint8 * size)()
    region = Region(ctypes.addressof(data), size)
    await store.register(region)
    assert await store.connect()
    print("connected", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await store.put([("half", region)])
asyncio.run(main())
"""


class Memory:
    """A run of bytes with an address."""

    def __init__(self, fill: int = 0, size: int = SIZE) -> None:
        self.data = (ctypes.c_uint8 * size)()
        ctypes.memset(self.data, fill, size)
        self.region = Region(ctypes.addressof(self.data), size)


async def spawn(script: str, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, *arguments,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip


async def read_line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(20):
        return (await process.stdout.readline()).decode().strip()


async def freeze(process: asyncio.subprocess.Process) -> None:
    """Stops a process and waits until the kernel says that it stands still."""
    process.send_signal(signal.SIGSTOP)
    stat = Path(f"/proc/{process.pid}/stat")
    async with asyncio.timeout(5):
        while stat.read_text().rpartition(")")[2].split()[0] != "T":  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.005)


async def client(master: str, *memories: Memory) -> MooncakeStore:
    store = MooncakeStore(master, "127.0.0.1")
    for memory in memories:
        await store.register(memory.region)
    assert await store.connect()
    return store


async def test_a_master_that_comes_back_empty_is_used_again_by_the_same_client() -> None:
    source, target = Memory(5), Memory()
    async with mooncake.mooncake_store() as running:
        store = await client(running.master, source, target)
        assert await store.put([("a", source.region)]) == [PutOutcome.STORED]
        await mooncake.kill(running.master_process)
        async with asyncio.timeout(15):
            assert await store.exists(["a"]) == [False]
        assert store.is_open
        await running.restart_master()
        async with asyncio.timeout(20):
            # The node mounts its segment again by itself, after a moment that nothing announces.
            while (  # noqa: ASYNC110
                await store.put([("b", source.region)])
            ) != [PutOutcome.STORED]:
                await asyncio.sleep(0.05)
            assert await store.exists(["a", "b"]) == [False, True]
            assert await store.get([("b", target.region)]) == [True]
        assert bytes(target.data) == bytes(source.data)
        await store.close()


async def test_a_master_that_hangs_at_the_start_is_left_alone_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Each try to set up holds the whole interpreter for seconds; a refused connection does not.
    monkeypatch.setattr("k3core.transfer.mooncake.OPEN_S", 0.0)
    async with mooncake.mooncake_store() as running:
        await freeze(running.master_process)
        try:
            store = MooncakeStore(running.master, "127.0.0.1")
            async with asyncio.timeout(20):
                assert not await store.connect()
            assert store.is_open
        finally:
            running.master_process.send_signal(signal.SIGCONT)
        await store.close()
    away = MooncakeStore(running.master, "127.0.0.1")
    assert not await away.connect()
    assert not away.is_open
    await away.close()


async def test_objects_of_a_dead_owner_count_as_absent_after_the_first_failure() -> None:
    source, target = Memory(5), Memory()
    async with mooncake.mooncake_store() as running:
        store = await client(running.master, source, target)
        assert await store.put([("a", source.region)]) == [PutOutcome.STORED]
        await mooncake.kill(running.node_process)
        async with asyncio.timeout(10):
            assert await store.get([("a", target.region)]) == [False]
            assert await store.exists(["a"]) == [False]
            assert await store.put([("a", source.region)]) == [PutOutcome.FAILED]
        await store.close()


async def test_a_frozen_owner_costs_one_time_out_and_then_the_store_is_left_alone() -> None:
    source, target = Memory(5), Memory()
    async with mooncake.mooncake_store() as running:
        store = await client(running.master, source, target)
        assert await store.put([("a", source.region)]) == [PutOutcome.STORED]
        await freeze(running.node_process)
        try:
            async with asyncio.timeout(10):
                assert await store.get([("a", target.region)]) == [False]
            assert store.is_open
            async with asyncio.timeout(1):
                assert await store.get([("a", target.region)]) == [False]
                assert await store.put([("c", source.region)]) == [PutOutcome.FAILED]
        finally:
            running.node_process.send_signal(signal.SIGCONT)
        await store.close()


async def test_a_key_that_a_dead_writer_left_half_written_is_not_said_to_be_stored() -> None:
    source, target = Memory(5), Memory()
    async with mooncake.mooncake_store() as running:
        store = await client(running.master, source, target)
        writer = await spawn(WRITER, running.master, str(SIZE))
        assert await read_line(writer) == "connected"
        await freeze(running.node_process)
        try:
            assert writer.stdin is not None
            writer.stdin.write(b"go\n")
            # The writer is inside its put when the master lists the key, unreadable.
            async with asyncio.timeout(10):
                while not await half_written(store):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            await mooncake.kill(writer)
        finally:
            running.node_process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(30):
            assert await store.put([("half", source.region)]) == [PutOutcome.FAILED]
            assert await store.get([("half", target.region)]) == [False]
            assert await store.exists(["half"]) == [False]
            # The master gives the key up after `put_start_discard_timeout_sec`.
            while (  # noqa: ASYNC110
                await store.put([("half", source.region)])
            ) != [PutOutcome.STORED]:
                await asyncio.sleep(0.2)
            assert await store.get([("half", target.region)]) == [True]
        assert bytes(target.data) == bytes(source.data)
        await store.close()


async def half_written(store: MooncakeStore) -> bool:
    native = store._native  # pyright: ignore[reportPrivateUsage] - no door shows such keys
    return await asyncio.to_thread(native.get_size, "half") == -703


async def test_a_frozen_peer_costs_one_time_out_and_other_peers_none() -> None:
    here = await MooncakeTransferEngine.open("127.0.0.1")
    source = Memory(9)
    await here.register(source.region)
    frozen, healthy = await spawn(PEER), await spawn(PEER)
    sessions = [(await read_line(peer)).split() for peer in (frozen, healthy)]
    to_frozen, to_healthy = (
        (session, [Write(source.region.address, int(address), 65536)])
        for session, address in sessions
    )
    async with asyncio.timeout(10):
        await here.write(*to_frozen)
        await here.write(*to_healthy)
    await freeze(frozen)
    try:
        waiting = [asyncio.get_running_loop().create_task(here.write(*to_frozen)) for _ in range(3)]
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await here.write(*to_healthy)
        assert not any(task.done() for task in waiting)
        started_s = time.monotonic()
        async with asyncio.timeout(40):
            results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(result, TierUnavailable) for result in results), results
        took_s = time.monotonic() - started_s
        with pytest.raises(TierUnavailable):
            async with asyncio.timeout(took_s / 2):
                await here.write(*to_frozen)
    finally:
        frozen.send_signal(signal.SIGCONT)
    for peer in (frozen, healthy):
        await mooncake.kill(peer)
    await here.close()
