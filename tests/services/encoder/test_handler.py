import asyncio
import random
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.fake_preprocessor import FakePreprocessor, patches_of, slot_of
from support.golden_model import MICRO_A, golden

from k3_encoder.handler import EncoderHandler, EncoderParts
from k3_encoder.room import Room
from k3_encoder.shelf import CHECKSUM_BYTES, Shelf
from k3_encoder.tower import Tower
from k3core.engine.host_memory import HostMemory, Span
from k3core.model.vision import VisionModel
from k3core.transfer.base import ObjectStore, Region, TransferEngine
from k3core.transfer.memory import MemoryFabric, MemoryObjectStore
from k3core.weights.loading import LoadOptions
from k3core.weights.vision_loading import load_vision_model
from k3wire.bus.memory import MemoryBus
from k3wire.errors import (
    Cancelled,
    ImageParseError,
    ImageTooLarge,
    InternalError,
    InvalidRequest,
    K3Error,
    Overloaded,
    SlowDown,
    TierUnavailable,
    WorkerLost,
)
from k3wire.messages.base import BufferSpan, StageReport
from k3wire.messages.control import Cancel
from k3wire.messages.encode import EncodeItem, EncodeReply, EncodeRequest
from k3wire.messages.media import ImageSlot

WAIT_S = 10.0
WIDTH = 64
PREFIX = "l3/micro/"
SMALL = slot_of("small")
TOKEN_BYTES = 4 * WIDTH
PATCH_BYTES = 4 * 3 * 14 * 14


@cache
def model() -> VisionModel:
    config = golden().config.vision
    assert config is not None
    return load_vision_model(MICRO_A, config, LoadOptions(torch.device("cpu"), torch.float32))


@cache
def expected(name: str, rows: int = 2, columns: int = 2) -> npt.NDArray[np.float32]:
    """What the tower makes of a picture, asked directly: [tokens, WIDTH]."""
    slot = slot_of(name, rows, columns)
    with torch.inference_mode():
        (found,) = model()(torch.from_numpy(patches_of(slot)), [slot.grid_thw])
    return found.numpy()


@dataclass
class Bench:
    """An encoder, the preprocessor behind it, and a caller's memory."""

    handler: EncoderHandler
    preprocessor: FakePreprocessor
    transfer: TransferEngine
    memory: HostMemory
    next_offset: int = 0
    pictures: dict[int, ImageSlot] = field(default_factory=dict[int, ImageSlot])

    @property
    def shelf(self) -> Shelf:
        return self.handler.parts.shelf

    @property
    def pixel_room(self) -> Room:
        return self.handler.parts.pixel_room

    def item(self, slot: ImageSlot, token_bytes: int = TOKEN_BYTES) -> EncodeItem:
        size = slot.num_tokens * token_bytes
        address = self.memory.address + self.next_offset
        self.next_offset += size
        span = BufferSpan(session=self.transfer.session, address=address, size_bytes=size)
        return EncodeItem(slot=slot, destination=span)

    def request(
        self, request_id: str, items: Sequence[EncodeItem], dtype: str = "float32"
    ) -> EncodeRequest:
        return EncodeRequest(
            request_id=request_id,
            items=tuple(items),
            dtype=dtype,
            weights_fingerprint="micro",
            deadline_unix_ns=time.time_ns() + int(WAIT_S * 1e9),
        )

    async def ask(
        self, slots: Sequence[ImageSlot], request_id: str = "r"
    ) -> tuple[EncodeReply, list[npt.NDArray[np.float32]]]:
        items = [self.item(slot) for slot in slots]
        reply = await self.handler.encode(self.request(request_id, items))
        return reply, [self.rows(item) for item in items]

    def rows(self, item: EncodeItem) -> npt.NDArray[np.float32]:
        offset = item.destination.address - self.memory.address
        view = self.memory.view(offset, item.destination.size_bytes)
        return np.frombuffer(view, dtype=np.float32).reshape(-1, WIDTH)


async def open_bench(
    store: ObjectStore | None, cache_bytes: int, pixel_bytes: int, fabric: MemoryFabric
) -> Bench:
    bus, transfer, own = MemoryBus(), fabric.engine(), fabric.engine()
    memory = HostMemory(1 << 22)
    await transfer.register(Region(memory.address, memory.size_bytes))
    cache_room, pixel_room = Room(cache_bytes), Room(pixel_bytes)
    for room in (cache_room, pixel_room):
        await own.register(Region(room.memory.address, room.memory.size_bytes))
    if store is not None:
        await store.register(Region(cache_room.memory.address, cache_room.memory.size_bytes))
    tower = Tower.load(MICRO_A, "cpu", "float32", 64)
    assert tower is not None
    tower.start()
    parts = EncoderParts(
        bus=bus,
        transfer=own,
        tower=tower,
        shelf=Shelf(cache_room, store, PREFIX),
        pixel_room=pixel_room,
        worker_id="encoder-test",
        fingerprint="micro",
        processor_version="test",
    )
    preprocessor = FakePreprocessor(bus, fabric.engine())
    await preprocessor.start()
    return Bench(EncoderHandler(parts), preprocessor, transfer, memory)


def with_bench(
    test: Callable[[Bench], Awaitable[None]],
    *,
    cache_bytes: int = 1 << 20,
    pixel_bytes: int = 1 << 20,
    stores: Sequence[ObjectStore | None] = (None,),
) -> None:
    """Runs a test on a bench; with several stores, on one bench after the other."""

    async def run() -> None:
        torch.set_num_threads(1)
        for store in stores:
            bench = await open_bench(store, cache_bytes, pixel_bytes, MemoryFabric())
            try:
                async with asyncio.timeout(2 * WAIT_S):
                    await test(bench)
            finally:
                await bench.handler.drain()
                await bench.handler.parts.tower.close()
                bench.pixel_room.close()

    asyncio.run(run())


def own_report(reply: EncodeReply) -> StageReport:
    (report,) = (report for report in reply.reports if report.stage == "encoder")
    return report


def test_embeddings_are_the_towers_and_the_second_time_come_from_memory() -> None:
    async def test(bench: Bench) -> None:
        reply, (rows,) = await bench.ask([slot_of("cat", 4, 6)])
        assert np.array_equal(rows, expected("cat", 4, 6))
        (item,) = reply.items
        assert (item.size_bytes, item.checksum) == (rows.nbytes, zlib.crc32(rows.tobytes()))
        assert item.feature_key == slot_of("cat").feature_key
        assert [(r.stage, r.outcome) for r in reply.reports] == [
            ("encoder", "miss"),
            ("preprocessor", "miss"),
        ]
        again, (same,) = await bench.ask([slot_of("cat", 4, 6)], "again")
        assert np.array_equal(same, rows)
        (report,) = again.reports
        assert (report.outcome, report.detail, report.num_hits) == ("hit", "local", 1)
        assert report.saved_ns > 0
        assert bench.preprocessor.names == ["cat"]
        assert bench.handler.num_tower_runs == 1

    with_bench(test)


def test_two_requests_at_once_have_an_image_made_once() -> None:
    async def test(bench: Bench) -> None:
        bench.preprocessor.gate.clear()
        async with asyncio.TaskGroup() as group:
            asks = [group.create_task(bench.ask([SMALL], f"r{i}")) for i in range(4)]
            await bench.preprocessor.asked.wait()
            await asyncio.sleep(0)
            assert bench.handler.num_requests == 4
            bench.preprocessor.gate.set()
        for ask in asks:
            assert np.array_equal(ask.result()[1][0], expected("small"))
        assert bench.preprocessor.names == ["small"]
        details = sorted(own_report(ask.result()[0]).detail for ask in asks)
        assert details == ["computed", "joined", "joined", "joined"]
        # What was done once is told once.
        assert sum(len(ask.result()[0].reports) for ask in asks) == 5

    with_bench(test)


def test_a_picture_that_comes_twice_in_a_request_is_made_once() -> None:
    async def test(bench: Bench) -> None:
        reply, (one, two) = await bench.ask([SMALL, SMALL])
        assert np.array_equal(one, expected("small"))
        assert np.array_equal(two, expected("small"))
        assert len(reply.items) == 2
        assert bench.handler.num_tower_runs == 1

    with_bench(test)


def test_each_dtype_is_a_picture_of_its_own() -> None:
    async def test(bench: Bench) -> None:
        await bench.ask([SMALL])
        item = bench.item(SMALL, 2 * WIDTH)
        reply = await bench.handler.encode(bench.request("half", [item], "bfloat16"))
        assert own_report(reply).outcome == "miss"
        offset = item.destination.address - bench.memory.address
        view = bench.memory.view(offset, item.destination.size_bytes)
        found = torch.frombuffer(view, dtype=torch.bfloat16).reshape(-1, WIDTH)
        wanted = torch.from_numpy(expected("small")).bfloat16()
        assert torch.equal(found, wanted)

    with_bench(test)


def test_an_encoder_that_starts_empty_hits_what_another_shared() -> None:
    outcomes: list[tuple[str, str, int]] = []

    async def test(bench: Bench) -> None:
        reply, (rows,) = await bench.ask([SMALL])
        assert np.array_equal(rows, expected("small"))
        report = own_report(reply)
        outcomes.append((report.outcome, report.detail, len(bench.preprocessor.requests)))

    store = MemoryObjectStore()
    with_bench(test, stores=[store, store])
    assert outcomes == [("miss", "computed", 1), ("hit", "shared", 0)]


def test_a_damaged_shared_copy_is_a_miss() -> None:
    store = MemoryObjectStore()

    async def test(bench: Bench) -> None:
        garbage = HostMemory(SMALL.num_tokens * TOKEN_BYTES + CHECKSUM_BYTES)
        garbage.view(0, 8)[:] = b"\x07" * 8
        region = Region(garbage.address, garbage.size_bytes)
        await store.register(region)
        await store.put([(PREFIX + (SMALL.feature_key + b"float32").hex(), region)])
        reply, (rows,) = await bench.ask([SMALL])
        assert np.array_equal(rows, expected("small"))
        assert own_report(reply).outcome == "miss"

    with_bench(test, stores=[store])


def test_an_image_larger_than_the_cache_is_computed_without_it() -> None:
    async def test(bench: Bench) -> None:
        for _ in range(2):
            reply, (rows,) = await bench.ask([slot_of("wide", 4, 10)])
            assert np.array_equal(rows, expected("wide", 4, 10))
            assert own_report(reply).outcome == "bypass"
        assert bench.shelf.num_entries == 0
        assert bench.pixel_room.used_bytes == 0

    with_bench(test, cache_bytes=2 * TOKEN_BYTES)


def test_free_memory_in_too_many_pieces_is_no_error() -> None:
    async def test(bench: Bench) -> None:
        blocker = bench.shelf.room.try_allocate(bench.shelf.room.memory.size_bytes)
        assert blocker is not None
        reply, (rows,) = await bench.ask([SMALL])
        assert np.array_equal(rows, expected("small"))
        assert own_report(reply).detail == "no room in one piece"
        bench.shelf.room.free(blocker)
        reply, _ = await bench.ask([SMALL])
        assert own_report(reply).outcome == "miss"

    with_bench(test)


def test_an_image_that_never_fits_is_refused_by_its_part() -> None:
    async def test(bench: Bench) -> None:
        with pytest.raises(ImageTooLarge) as caught:
            await bench.ask([slot_of("vast", 8, 8)])
        assert caught.value.param == "vast"

    with_bench(test, pixel_bytes=16 * PATCH_BYTES)


def test_more_images_than_fit_are_computed_in_waves() -> None:
    async def test(bench: Bench) -> None:
        names = [f"picture {i}" for i in range(40)]
        _, found = await bench.ask([slot_of(name, 4, 4) for name in names])
        for name, rows in zip(names, found, strict=True):
            assert np.array_equal(rows, expected(name, 4, 4))
        assert bench.preprocessor.names.count("picture 7") == 1
        assert bench.pixel_room.used_bytes == 0
        assert bench.shelf.room.used_bytes <= bench.shelf.room.memory.size_bytes
        assert 0 < bench.shelf.num_entries <= 5

    # Patches of three images and embeddings of about five.
    with_bench(test, cache_bytes=5 * (4 * TOKEN_BYTES + 64), pixel_bytes=60 * PATCH_BYTES)


def test_a_cancelled_request_ends_and_stops_its_preprocessor() -> None:
    async def test(bench: Bench) -> None:
        bench.preprocessor.gate.clear()
        async with asyncio.TaskGroup() as group:

            async def ask() -> None:
                with pytest.raises(Cancelled):
                    await bench.ask([SMALL], "leaving")

            group.create_task(ask())
            await bench.preprocessor.asked.wait()
            bench.handler.cancel(Cancel(request_id="leaving"))
            bench.handler.cancel(Cancel(request_id="unknown"))
        assert bench.preprocessor.cancels == ["leaving"]
        assert bench.handler.num_requests == 0
        assert bench.shelf.room.used_bytes == 0
        # A late write may still come: the room of the patches is not given away at once.
        assert bench.pixel_room.used_bytes > 0
        bench.preprocessor.gate.set()
        _, (rows,) = await bench.ask([SMALL], "next")
        assert np.array_equal(rows, expected("small"))

    with_bench(test)


def test_a_cancel_leaves_others_who_wait_for_the_image_alone() -> None:
    async def test(bench: Bench) -> None:
        bench.preprocessor.gate.clear()
        async with asyncio.TaskGroup() as group:
            leaving = group.create_task(bench.ask([SMALL], "leaving"))
            await bench.preprocessor.asked.wait()
            staying = group.create_task(bench.ask([SMALL], "staying"))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.wait([leaving])
            bench.preprocessor.gate.set()
        assert leaving.cancelled()
        assert np.array_equal(staying.result()[1][0], expected("small"))
        assert bench.preprocessor.names == ["small"]

    with_bench(test)


def test_who_joined_work_that_failed_tries_again() -> None:
    async def test(bench: Bench) -> None:
        bench.preprocessor.gate.clear()
        bench.preprocessor.errors = [WorkerLost("gone")]
        async with asyncio.TaskGroup() as group:

            async def first() -> None:
                with pytest.raises(WorkerLost):
                    await bench.ask([SMALL], "first")

            group.create_task(first())
            await bench.preprocessor.asked.wait()
            second = group.create_task(bench.ask([SMALL], "second"))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            bench.preprocessor.gate.set()
        assert np.array_equal(second.result()[1][0], expected("small"))
        assert bench.preprocessor.names == ["small", "small"]

    with_bench(test)


@pytest.mark.parametrize("error", [ImageParseError("broken"), InternalError("fault")])
def test_a_failed_image_fails_the_request_and_is_not_kept(error: K3Error) -> None:
    async def test(bench: Bench) -> None:
        bench.preprocessor.errors = [error]
        with pytest.raises(type(error)):
            await bench.ask([SMALL])
        assert bench.shelf.num_entries == bench.shelf.room.used_bytes == 0
        _, (rows,) = await bench.ask([SMALL])
        assert np.array_equal(rows, expected("small"))

    with_bench(test)


def test_an_image_error_names_the_part_of_whoever_asked() -> None:
    async def test(bench: Bench) -> None:
        bench.preprocessor.errors = [ImageParseError("broken", param="somebody else's")]
        with pytest.raises(ImageParseError) as caught:
            await bench.ask([slot_of("mine")])
        assert caught.value.param == "mine"

    with_bench(test)


def test_a_busy_preprocessor_is_asked_again() -> None:
    async def test(bench: Bench) -> None:
        bench.preprocessor.errors = [SlowDown("full")]
        _, (rows,) = await bench.ask([SMALL])
        assert np.array_equal(rows, expected("small"))
        assert len(bench.preprocessor.requests) == 2

    with_bench(test)


def test_patches_that_were_damaged_on_the_way_are_not_encoded() -> None:
    async def test(bench: Bench) -> None:
        bench.preprocessor.is_lying = True
        with pytest.raises(TierUnavailable):
            await bench.ask([SMALL])
        assert bench.handler.num_tower_runs == 0

    with_bench(test)


def test_a_request_for_something_else_is_refused() -> None:
    async def test(bench: Bench) -> None:
        item = bench.item(SMALL)
        other = EncodeRequest(
            request_id="r",
            items=(item,),
            dtype="float32",
            weights_fingerprint="other",
            deadline_unix_ns=0,
        )
        with pytest.raises(Overloaded):
            await bench.handler.encode(other)
        with pytest.raises(InvalidRequest):
            await bench.handler.encode(bench.request("r", [item], "float64"))
        with pytest.raises(InternalError):
            await bench.handler.encode(bench.request("r", [bench.item(SMALL, TOKEN_BYTES - 1)]))
        assert bench.preprocessor.requests == []

    with_bench(test)


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_gives_right_rows_and_leaves_nothing_behind(seed: int) -> None:
    rng = random.Random(seed)

    async def ask(bench: Bench, request_id: str, picks: Sequence[tuple[str, int, int]]) -> None:
        try:
            _, found = await bench.ask([slot_of(*pick) for pick in picks], request_id)
        except Cancelled:
            return
        for pick, rows in zip(picks, found, strict=True):
            assert np.array_equal(rows, expected(*pick))

    async def client(bench: Bench, number: int) -> None:
        for turn in range(6):
            request_id = f"{number}/{turn}"
            picks = [rng.choice(PICTURES) for _ in range(rng.randint(1, 3))]
            async with asyncio.TaskGroup() as group:
                group.create_task(ask(bench, request_id, picks))
                if rng.random() < 0.3:
                    for _ in range(rng.randint(0, 12)):
                        await asyncio.sleep(0)
                    bench.handler.cancel(Cancel(request_id=request_id))

    async def test(bench: Bench) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(client(bench, number))
        await bench.handler.drain()
        assert bench.handler.num_requests == 0
        sizes = held_bytes(bench)
        assert sum(sizes) == bench.shelf.room.used_bytes
        assert len(sizes) == bench.shelf.num_entries

    with_bench(
        test,
        cache_bytes=6 * TOKEN_BYTES + 256,
        pixel_bytes=1 << 20,
        stores=[None, MemoryObjectStore(4096)],
    )


def held_bytes(bench: Bench) -> list[int]:
    held = [bench.shelf.find(key) for key in KEYS]
    return [stored.span.size_bytes for stored in held if stored is not None]


PICTURES = [("a", 2, 2), ("b", 2, 4), ("c", 4, 4), ("d", 2, 2), ("e", 2, 6), ("f", 4, 8)]
KEYS = [slot_of(*pick).feature_key + b"float32" for pick in PICTURES]


def test_a_span_taken_is_one_nobody_else_has() -> None:
    async def run() -> None:
        room = Room(1024)
        first = room.try_allocate(1000)
        assert first is not None
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            got: list[Span] = []

            async def take(size: int) -> None:
                async with room.span(size, "p") as span:
                    got.append(span)

            # The large one came first: the small one, which would fit, waits its turn.
            group.create_task(take(512))
            await asyncio.sleep(0)
            group.create_task(take(16))
            await asyncio.sleep(0)
            assert got == []
            room.free(first)
        assert [span.size_bytes for span in got] == [512, 64]
        assert room.used_bytes == 0

    asyncio.run(run())
