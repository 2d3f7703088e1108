import asyncio
import zlib

import numpy as np
import pytest
import torch
from support.encoder_bench import (
    PREFIX,
    TOKEN_BYTES,
    WIDTH,
    Bench,
    expected,
    own_report,
    with_bench,
)
from support.fake_preprocessor import slot_of

from k3_encoder.shelf import CHECKSUM_BYTES
from k3core.engine.host_memory import HostMemory
from k3core.transfer.base import Region
from k3core.transfer.memory import MemoryObjectStore
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
from k3wire.messages.control import Cancel
from k3wire.messages.encode import EncodeRequest

SMALL = slot_of("small")
PATCH_BYTES = 4 * 3 * 14 * 14


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


def test_cac_05_each_dtype_is_a_picture_of_its_own() -> None:
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


def test_cac_05_an_encoder_of_another_checkpoint_takes_nothing_that_was_shared() -> None:
    outcomes: list[tuple[str, str, str]] = []

    async def test(bench: Bench) -> None:
        reply, (rows,) = await bench.ask([SMALL])
        assert np.array_equal(rows, expected("small"))
        report = own_report(reply)
        outcomes.append((bench.handler.parts.fingerprint, report.outcome, report.detail))

    store = MemoryObjectStore()
    with_bench(test, stores=[store, store], checkpoints=["old", "new"])
    assert outcomes == [("old", "miss", "computed"), ("new", "miss", "computed")]


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


def test_cac_05_an_image_larger_than_the_cache_is_computed_without_it() -> None:
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


def test_cac_06_more_images_than_fit_are_computed_in_waves() -> None:
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


def test_cac_05_a_cancelled_request_ends_and_stops_its_preprocessor() -> None:
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
