"""The data plane over real Mooncake on loopback, and the small one in memory."""

import asyncio
import ctypes
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support import mooncake

from k3core.transfer.base import PutOutcome, Region, Write
from k3core.transfer.memory import MemoryFabric, MemoryObjectStore
from k3core.transfer.mooncake import MooncakeStore, MooncakeTransferEngine
from k3wire.errors import TierUnavailable

SIZE = 256 * 1024


class Memory:
    """A run of bytes with an address."""

    def __init__(self, fill: int = 0, size: int = SIZE) -> None:
        self.data = (ctypes.c_uint8 * size)(*([fill] * 0))
        ctypes.memset(self.data, fill, size)
        self.region = Region(ctypes.addressof(self.data), size)

    def bytes(self) -> bytes:
        return bytes(self.data)


@pytest.fixture(params=["memory", "mooncake"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Any, Any]]:
    if request.param == "memory":
        fabric = MemoryFabric()
        engines = fabric.engine(), fabric.engine()
    else:
        engines = (
            await MooncakeTransferEngine.open("127.0.0.1"),
            await MooncakeTransferEngine.open("127.0.0.1"),
        )
    yield engines
    for engine in engines:
        await engine.close()


async def test_scattered_writes_land_where_they_were_sent(pair: tuple[Any, Any]) -> None:
    here, there = pair
    source, target = Memory(), Memory()
    for index in range(SIZE):
        source.data[index] = (index * 7 + index // 251) % 256
    await here.register(source.region)
    await there.register(target.region)
    step = SIZE // 64
    writes = [
        Write(source.region.address + i * step, target.region.address + (63 - i) * step, step)
        for i in range(64)
    ]
    async with asyncio.timeout(5):
        await here.write(there.session, writes)
    got, sent = target.bytes(), source.bytes()
    for i in range(64):
        assert got[(63 - i) * step : (64 - i) * step] == sent[i * step : (i + 1) * step]


async def test_memory_that_nobody_registered_is_neither_read_nor_written(
    pair: tuple[Any, Any],
) -> None:
    here, there = pair
    source, target, stray = Memory(1), Memory(2), Memory(3)
    await here.register(source.region)
    await there.register(target.region)
    inside, outside = source.region.address, stray.region.address
    for write in (Write(outside, target.region.address, 8), Write(inside, outside, 8)):
        with pytest.raises(TierUnavailable):
            await here.write(there.session, [write])
    assert set(stray.bytes()) == {3}
    assert set(target.bytes()) == {2}


async def test_registering_twice_is_refused(pair: tuple[Any, Any]) -> None:
    memory = Memory()
    await pair[0].register(memory.region)
    with pytest.raises(TierUnavailable):
        await pair[0].register(memory.region)


async def test_a_closed_engine_refuses_instead_of_crashing(pair: tuple[Any, Any]) -> None:
    here, there = pair
    source = Memory()
    await here.register(source.region)
    await here.close()
    await here.close()
    with pytest.raises(TierUnavailable):
        await here.write(there.session, [Write(source.region.address, 1, 1)])


PEER = """
import asyncio, ctypes, sys
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


async def test_a_peer_that_was_killed_is_an_error_at_once() -> None:
    here = await MooncakeTransferEngine.open("127.0.0.1")
    source = Memory(9)
    await here.register(source.region)
    peer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PEER, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert peer.stdout is not None
    async with asyncio.timeout(20):
        session, address = (await peer.stdout.readline()).decode().split()
    write = Write(source.region.address, int(address), 65536)
    async with asyncio.timeout(10):
        await here.write(session, [write])
        peer.kill()
        await peer.wait()
        with pytest.raises(TierUnavailable):
            await here.write(session, [write])
    await here.close()


async def test_objects_are_shared_between_clients_and_vanish_with_the_master() -> None:
    async with mooncake.mooncake_store() as running:
        first = MooncakeStore(running.master, "127.0.0.1")
        second = MooncakeStore(running.master, "127.0.0.1")
        source, target = Memory(5), Memory(0)
        await first.register(source.region)
        await second.register(target.region)
        async with asyncio.timeout(20):
            assert await first.put([("a", source.region)]) == [PutOutcome.STORED]
            assert await first.put([("a", source.region)]) == [PutOutcome.PRESENT]
            assert await second.exists(["a", "b"]) == [True, False]
            assert await second.get([("a", target.region)]) == [True]
        assert target.bytes() == source.bytes()
        half = Region(target.region.address, SIZE // 2)
        assert await second.get([("a", half), ("b", half)]) == [False, False]
        await second.remove(["a"])
        assert await first.exists(["a"]) == [False]
        await mooncake.kill(running.master_process)
        async with asyncio.timeout(20):
            assert await second.get([("a", target.region)]) == [False]
        assert second.is_open
        assert await second.put([("c", target.region)]) == [PutOutcome.FAILED]
        for store in (first, second):
            await store.close()
            await store.close()
        assert await first.exists(["a"]) == [False]


async def test_a_full_store_refuses_and_keeps_what_it_has() -> None:
    async with mooncake.mooncake_store("16 MB") as running:
        store = MooncakeStore(running.master, "127.0.0.1")
        memory = Memory(1, 4 * 1024 * 1024)
        await store.register(memory.region)
        async with asyncio.timeout(30):
            outcomes = [(await store.put([(f"k{i}", memory.region)]))[0] for i in range(6)]
        assert outcomes[0] is PutOutcome.STORED
        assert PutOutcome.FULL in outcomes
        await store.close()


async def test_a_store_without_a_master_is_empty_and_quick_about_it() -> None:
    store = MooncakeStore(f"127.0.0.1:{mooncake.free_port()}", "127.0.0.1")
    memory = Memory()
    await store.register(memory.region)
    async with asyncio.timeout(5):
        assert await store.put([("a", memory.region)]) == [PutOutcome.FAILED]
        assert await store.get([("a", memory.region)]) == [False]
    await store.close()


async def test_the_store_in_memory_keeps_the_same_promises() -> None:
    store = MemoryObjectStore(capacity_bytes=SIZE)
    source, target = Memory(7), Memory(0)
    await store.register(source.region)
    await store.register(target.region)
    assert await store.put([("a", source.region)]) == [PutOutcome.STORED]
    assert await store.put([("a", source.region)]) == [PutOutcome.PRESENT]
    assert await store.put([("b", source.region)]) == [PutOutcome.FULL]
    assert await store.get([("a", target.region), ("b", target.region)]) == [True, False]
    assert target.bytes() == source.bytes()
    await store.remove(["a"])
    assert await store.exists(["a"]) == [False]
