"""Turns at making one thing: one at a time, and nobody is held up by the dead or the absent."""

import asyncio
from dataclasses import dataclass, field

from support.fetchers import AbsentStore, start

from k3wire.blobs.memory_store import MemoryBlobStore
from k3wire.blobs.turns import LOCK_LIFE_S, Turn, lock_key, take_turn

LONG_S = 60.0


async def taken(job: "asyncio.Task[Turn]") -> Turn:
    async with asyncio.timeout(5):
        return await job


async def test_one_at_a_time_and_who_waited_knows_it() -> None:
    store = MemoryBlobStore()
    first = await take_turn(store, "thing", LONG_S)
    waiting = start(take_turn(store, "thing", LONG_S))
    other = await take_turn(store, "another thing", LONG_S)
    assert not waiting.done()
    await first.end()
    second = await taken(waiting)
    assert (first.has_waited, other.has_waited, second.has_waited) == (False, False, True)
    # Even who had not to wait may have looked before another one had ended.
    assert first.may_be_late
    for turn in (second, other, first):
        await turn.end()
        await turn.end()
    assert await store.get(lock_key("thing")) is None


async def test_the_turn_of_the_dead_passes() -> None:
    store = MemoryBlobStore()
    await store.put_if_absent(lock_key("thing"), b"1", ttl_s=0.05)
    turn = await taken(start(take_turn(store, "thing", LONG_S)))
    assert turn.has_waited
    assert await store.get(lock_key("thing")) is not None
    await turn.end()


async def test_nobody_waits_longer_than_he_wants_to_for_one_who_lives() -> None:
    store = MemoryBlobStore()
    holder = await take_turn(store, "thing", LONG_S)
    late = await taken(start(take_turn(store, "thing", 0.02)))
    assert late.has_waited
    await late.end()
    # It was never his to give back.
    assert await store.get(lock_key("thing")) is not None
    await holder.end()


async def test_without_the_store_everybody_goes_on_at_once() -> None:
    turns = [await take_turn(AbsentStore(), "thing", LONG_S) for _ in range(2)]
    assert not any(turn.has_waited or turn.may_be_late for turn in turns)
    for turn in turns:
        await turn.end()


async def test_a_store_that_is_gone_for_a_moment_does_not_double_what_another_is_at() -> None:
    store = AbsentStore(is_gone=False)
    holder = await take_turn(store, "thing", LONG_S)
    waiting = start(take_turn(store, "thing", LONG_S))
    await asyncio.sleep(0)
    store.is_gone = True
    done, _ = await asyncio.wait([waiting], timeout=LOCK_LIFE_S / 4)
    assert not done
    store.is_gone = False
    await holder.end()
    turn = await taken(waiting)
    assert turn.has_waited
    assert await store.get(lock_key("thing")) is not None
    await turn.end()


async def test_a_store_that_stays_away_ends_the_wait_and_the_holder_ends_in_peace() -> None:
    store = AbsentStore(is_gone=False)
    holder = await take_turn(store, "thing", LONG_S)
    waiting = start(take_turn(store, "thing", LONG_S))
    await asyncio.sleep(0)
    store.is_gone = True
    assert (await taken(waiting)).has_waited
    await holder.end()


@dataclass
class Renewed:
    """Remembers renewals; a test may wait for the first one."""

    inner: MemoryBlobStore = field(default_factory=MemoryBlobStore)
    lives_s: list[float] = field(default_factory=list[float])
    renewed: asyncio.Event = field(default_factory=asyncio.Event)

    async def get(self, key: str) -> bytes | None:
        return await self.inner.get(key)

    async def put(self, key: str, data: bytes, *, ttl_s: float) -> None:
        await self.inner.put(key, data, ttl_s=ttl_s)

    async def put_if_absent(self, key: str, data: bytes, *, ttl_s: float) -> bool:
        return await self.inner.put_if_absent(key, data, ttl_s=ttl_s)

    async def delete(self, key: str) -> None:
        await self.inner.delete(key)

    async def touch(self, key: str, *, ttl_s: float) -> bool:
        self.lives_s.append(ttl_s)
        self.renewed.set()
        return await self.inner.touch(key, ttl_s=ttl_s)


async def test_who_lives_renews_until_the_end() -> None:
    store = Renewed()
    turn = await take_turn(store, "thing", LONG_S)
    async with asyncio.timeout(LOCK_LIFE_S):
        await store.renewed.wait()
    assert store.lives_s == [LOCK_LIFE_S]
    await turn.end()
    assert await store.get(lock_key("thing")) is None
