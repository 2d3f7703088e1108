"""Several encoders and one new picture: one computes it, and nobody waits for the dead or the absent."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch
from support.encoder_bench import PREFIX, WAIT_S, Bench, expected, open_bench, own_report
from support.fake_preprocessor import slot_of
from support.fetchers import AbsentStore, LateStore, start, until

from k3core.transfer.base import ObjectStore
from k3core.transfer.memory import MemoryFabric, MemoryObjectStore
from k3wire.blobs.base import BlobStore
from k3wire.blobs.memory_store import MemoryBlobStore
from k3wire.blobs.turns import lock_key, take_turn
from k3wire.errors import Cancelled
from k3wire.messages.control import Cancel
from k3wire.messages.encode import EncodeReply

PICTURE = slot_of("new", 4, 6)
LOCK = lock_key(PREFIX + (PICTURE.feature_key + b"float32").hex())


@dataclass
class Pair:
    """Two encoders with preprocessors of their own, on one store."""

    one: Bench
    two: Bench

    @property
    def num_made(self) -> int:
        return len(self.one.preprocessor.requests) + len(self.two.preprocessor.requests)

    def hold(self) -> None:
        for bench in (self.one, self.two):
            bench.preprocessor.gate.clear()

    def go(self) -> None:
        for bench in (self.one, self.two):
            bench.preprocessor.gate.set()


def with_pair(
    test: Callable[[Pair], Awaitable[None]],
    *,
    store: ObjectStore | None,
    turns: BlobStore | None,
    turns_of_two: BlobStore | None = None,
) -> None:
    async def run() -> None:
        torch.set_num_threads(1)
        fabric = MemoryFabric()
        benches = [
            await open_bench(store, 1 << 20, 1 << 20, fabric, own)
            for own in (turns, turns_of_two or turns)
        ]
        pair = Pair(*benches)
        try:
            async with asyncio.timeout(2 * WAIT_S):
                await test(pair)
        finally:
            pair.go()
            for bench in benches:
                await bench.handler.drain()
                await bench.handler.parts.tower.close()
                bench.pixel_room.close()

    asyncio.run(run())


def details(*asked: tuple[EncodeReply, object]) -> list[str]:
    return sorted(own_report(reply).detail for reply, _ in asked)


def test_two_encoders_compute_a_new_picture_once() -> None:
    turns = MemoryBlobStore()

    async def test(pair: Pair) -> None:
        pair.hold()
        jobs = [start(bench.ask([PICTURE])) for bench in (pair.one, pair.two)]
        await until(lambda: pair.num_made == 1)
        await until(lambda: pair.one.handler.num_requests and pair.two.handler.num_requests)
        # The one that waits has had every chance to begin.
        for _ in range(50):
            await asyncio.sleep(0)
        assert pair.num_made == 1
        pair.go()
        found = [await job for job in jobs]
        for _, (rows,) in found:
            assert np.array_equal(rows, expected("new", 4, 6))
        assert details(*found) == ["computed", "shared"]
        assert pair.num_made == 1
        assert pair.one.handler.num_tower_runs + pair.two.handler.num_tower_runs == 1
        waited = {own_report(r).detail: own_report(r).wait_ns for r, _ in found}
        assert waited["shared"] > 0
        await pair.one.shelf.settle()
        await pair.two.shelf.settle()
        assert await turns.get(LOCK) is None

    with_pair(test, store=MemoryObjectStore(), turns=turns)


def test_many_pictures_in_two_orders_are_each_computed_once() -> None:
    async def test(pair: Pair) -> None:
        slots = [slot_of(f"picture {number}") for number in range(12)]
        one, two = start(pair.one.ask(slots)), start(pair.two.ask(slots[::-1]))
        (_, forward), (_, backward) = await one, await two
        assert pair.num_made == len(slots)
        for slot, there, here in zip(slots, forward, backward[::-1], strict=True):
            assert np.array_equal(there, expected(slot.param))
            assert np.array_equal(there, here)

    with_pair(test, store=MemoryObjectStore(), turns=MemoryBlobStore())


def test_who_looked_before_the_other_had_ended_and_got_its_turn_after_it_looks_again() -> None:
    late = LateStore()

    async def test(pair: Pair) -> None:
        job = start(pair.two.ask([PICTURE]))
        await until(late.asked.is_set)
        first = await pair.one.ask([PICTURE])
        await pair.one.shelf.settle()
        late.go.set()
        second = await job
        assert (details(first), details(second)) == (["computed"], ["shared"])
        assert pair.num_made == 1

    with_pair(test, store=MemoryObjectStore(), turns=late.inner, turns_of_two=late)


def test_an_encoder_that_died_in_its_turn_is_not_waited_for() -> None:
    turns = MemoryBlobStore()

    async def test(pair: Pair) -> None:
        await turns.put_if_absent(LOCK, b"1", ttl_s=0.1)
        found = await pair.one.ask([PICTURE])
        assert details(found) == ["computed"]
        assert np.array_equal(found[1][0], expected("new", 4, 6))

    with_pair(test, store=MemoryObjectStore(), turns=turns)


def test_an_encoder_that_lives_and_never_gets_there_is_not_waited_for_for_ever() -> None:
    turns = MemoryBlobStore()

    async def test(pair: Pair) -> None:
        held = await take_turn(turns, LOCK.removesuffix(":lock"), 1.0)
        item = pair.one.item(PICTURE)
        soon = time.time_ns() + 2 * 10**9
        request = msgspec.structs.replace(pair.one.request("r", [item]), deadline_unix_ns=soon)
        reply = await pair.one.handler.encode(request)
        assert own_report(reply).detail == "computed"
        await held.end()

    with_pair(test, store=MemoryObjectStore(), turns=turns)


def test_a_holder_that_is_cancelled_lets_the_other_one_compute() -> None:
    async def test(pair: Pair) -> None:
        pair.hold()
        leaving = start(pair.one.ask([PICTURE], "leaving"))
        await until(lambda: pair.num_made == 1)
        staying = start(pair.two.ask([PICTURE], "staying"))
        await until(lambda: pair.two.handler.num_requests)
        pair.one.handler.cancel(Cancel(request_id="leaving"))
        with pytest.raises(Cancelled):
            await leaving
        pair.go()
        found = await staying
        assert details(found) == ["computed"]
        assert pair.num_made == 2

    with_pair(test, store=MemoryObjectStore(), turns=MemoryBlobStore())


@pytest.mark.parametrize(
    ("store", "turns"),
    [
        # Redis away; nothing shared; a store that takes nothing.
        (MemoryObjectStore(), AbsentStore()),
        (None, MemoryBlobStore()),
        (MemoryObjectStore(0), MemoryBlobStore()),
    ],
)
def test_without_the_means_to_agree_each_computes_its_own(
    store: ObjectStore | None, turns: BlobStore
) -> None:
    async def test(pair: Pair) -> None:
        for name in ("first", "second"):
            picture = slot_of(name)
            jobs = [start(bench.ask([picture])) for bench in (pair.one, pair.two)]
            found = [await job for job in jobs]
            for _, (rows,) in found:
                assert np.array_equal(rows, expected(name))
            assert set(details(*found)) <= {"computed", "shared"}

    with_pair(test, store=store, turns=turns)


def test_where_shared_pictures_get_lost_nobody_waits_for_anybody() -> None:
    turns = MemoryBlobStore()

    async def test(pair: Pair) -> None:
        for bench in (pair.one, pair.two):
            # Each finds out by its first one that the store takes nothing.
            await bench.ask([slot_of("before")])
            await bench.shelf.settle()
        pair.hold()
        jobs = [start(bench.ask([PICTURE])) for bench in (pair.one, pair.two)]
        await until(lambda: pair.num_made == 4)
        assert await turns.get(LOCK) is None
        pair.go()
        assert details(*[await job for job in jobs]) == ["computed", "computed"]

    with_pair(test, store=MemoryObjectStore(0), turns=turns)
