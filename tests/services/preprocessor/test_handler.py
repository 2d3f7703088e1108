"""The preprocessor by its call, with a real sandbox and everything else in memory."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace

import pytest
from support.pictures import encode, gradient
from support.preprocess_stage import CONFIG, OTHER, PICTURE, Stage, open_stage

from k3core.engine.host_memory import HostMemory
from k3core.transfer.base import Region
from k3core.transfer.memory import MemoryObjectStore
from k3text.images.geometry import plan
from k3text.images.keys import content_key, feature_key
from k3wire.blobs.image_keys import image_bytes_key
from k3wire.errors import (
    BlobLost,
    Cancelled,
    ImageParseError,
    InternalError,
    K3Error,
    NoResponders,
    TierUnavailable,
    WorkerLost,
)
from k3wire.messages.base import BufferSpan
from k3wire.messages.control import Cancel
from k3wire.messages.media import ImageRef, ImageSlot
from k3wire.messages.preprocess import PreprocessReply, PreprocessRequest
from k3wire.service.pieces import PieceHolder

WAIT_S = 10.0


@pytest.fixture
async def stage() -> AsyncGenerator[Stage]:
    async with open_stage() as opened:
        yield opened


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def outcome(reply: PreprocessReply) -> tuple[str, str]:
    return reply.reports[0].outcome, reply.reports[0].detail


async def test_pre_13_bytes_of_tier_l1_become_the_exact_floats_in_the_encoders_memory(
    stage: Stage,
) -> None:
    await stage.put(PICTURE)
    reply = await stage.ask(stage.request(PICTURE))
    stage.check(reply, PICTURE)
    (report,) = reply.reports
    assert (report.stage, report.tier, report.outcome) == ("preprocessor", "L2", "miss")
    assert report.size_bytes == reply.size_bytes
    assert (report.num_items, report.num_hits, report.saved_ns) == (1, 0, 0)
    assert report.duration_ns > 0


async def test_the_second_request_is_a_local_hit_that_saves_the_measured_cost(
    stage: Stage,
) -> None:
    await stage.put(PICTURE)
    await stage.ask(stage.request(PICTURE))
    await stage.blobs.delete(image_bytes_key(content_key(PICTURE)))
    stage.wipe()
    reply = await stage.ask(stage.request(PICTURE))
    stage.check(reply, PICTURE)
    (report,) = reply.reports
    assert outcome(reply) == ("hit", "local")
    assert report.num_hits == 1
    assert report.saved_ns > 0


async def test_another_process_finds_shared_patches_without_decoding() -> None:
    shared = MemoryObjectStore()
    async with open_stage(shared) as first:
        await first.put(PICTURE)
        await first.ask(first.request(PICTURE))
        await first.tier.settle()
    async with open_stage(shared) as second:
        reply = await second.ask(second.request(PICTURE))
        second.check(reply, PICTURE)
        assert outcome(reply) == ("hit", "shared")
        again = await second.ask(second.request(PICTURE))
        assert outcome(again) == ("hit", "local")


@pytest.mark.parametrize("damage", ["a piece is missing", "a byte is wrong", "a piece is short"])
async def test_damaged_shared_patches_are_a_miss_not_a_wrong_picture(damage: str) -> None:
    shared = MemoryObjectStore()
    async with open_stage(shared) as first:
        await first.put(PICTURE)
        await first.ask(first.request(PICTURE))
        await first.tier.settle()
    key = f"l2:{feature_key(content_key(PICTURE), CONFIG).hex()}:2"
    whole = HostMemory(13 * 3 * 14 * 14 * 4 + 100)
    await shared.register(Region(whole.address, whole.size_bytes))
    assert await shared.get([(key, Region(whole.address, whole.size_bytes))]) == [True]
    await shared.remove([key])
    if damage != "a piece is missing":
        whole.view(500, 1)[:] = bytes([whole.view(500, 1)[0] ^ 1])
        size = whole.size_bytes - (damage == "a piece is short")
        await shared.put([(key, Region(whole.address, size))])
    async with open_stage(shared) as second:
        await second.put(PICTURE)
        reply = await second.ask(second.request(PICTURE))
        second.check(reply, PICTURE)
        assert outcome(reply)[0] == "miss"


async def test_patches_larger_than_the_cache_are_still_served() -> None:
    async with open_stage(cache_bytes=1000) as stage:
        await stage.put(PICTURE)
        for _ in range(2):
            await stage.tier.settle()
            reply = await stage.ask(stage.request(PICTURE))
            stage.check(reply, PICTURE)


async def test_cac_07_the_fetcher_is_asked_when_l1_lost_the_bytes(stage: Stage) -> None:
    await stage.serve_fetcher(PICTURE, PieceHolder("fetcher.pieces"))
    reply = await stage.ask(stage.request(PICTURE, url="https://a.example/cat.png"))
    stage.check(reply, PICTURE)
    assert [report.stage for report in reply.reports] == ["preprocessor", "fetcher"]
    assert [read.image.url for read in stage.reads] == ["https://a.example/cat.png"]


async def test_cac_07_the_holder_of_a_data_url_is_asked_and_the_fetcher_is_not(
    stage: Stage,
) -> None:
    holder = PieceHolder("gateway.pieces")
    holder.hold(PICTURE)
    await holder.serve(stage.bus)
    reply = await stage.ask(stage.request(PICTURE, holder=holder.subject))
    stage.check(reply, PICTURE)
    assert len(reply.reports) == 1


async def test_wrong_bytes_in_l1_are_not_believed(stage: Stage) -> None:
    await stage.blobs.put(image_bytes_key(content_key(PICTURE)), OTHER, ttl_s=60)
    with pytest.raises(BlobLost):
        await stage.ask(stage.request(PICTURE))
    await stage.serve_fetcher(PICTURE, PieceHolder("fetcher.pieces"))
    reply = await stage.ask(stage.request(PICTURE, url="https://a.example/cat.png"))
    stage.check(reply, PICTURE)


async def test_an_address_that_changed_its_picture_is_blob_lost(stage: Stage) -> None:
    await stage.serve_fetcher(OTHER, PieceHolder("fetcher.pieces"))
    with pytest.raises(BlobLost):
        await stage.ask(stage.request(PICTURE, url="https://a.example/cat.png"))


async def test_a_damaged_picture_names_the_part_of_the_request(stage: Stage) -> None:
    cut_off = PICTURE[: len(PICTURE) // 2]
    await stage.put(cut_off)
    with pytest.raises(ImageParseError) as raised:
        await stage.ask(stage.request(cut_off))
    assert raised.value.param == "messages[0].content[1].image_url"


async def test_fet_24_a_damaged_picture_is_decoded_once_and_refused_again_without_its_bytes(
    stage: Stage,
) -> None:
    cut_off = PICTURE[: len(PICTURE) // 2]
    await stage.put(cut_off)
    messages: list[str] = []
    for _ in range(2):
        with pytest.raises(ImageParseError) as raised:
            await stage.ask(stage.request(cut_off))
        messages.append(raised.value.message)
        await stage.blobs.delete(image_bytes_key(content_key(cut_off)))
    assert messages[0] == messages[1]


async def test_a_picture_that_lost_its_worker_is_not_remembered_as_broken(stage: Stage) -> None:
    await stage.put(PICTURE)
    for pid in stage.sandbox.pids:
        os.kill(pid, signal.SIGSTOP)
    async with asyncio.TaskGroup() as group:

        async def lose() -> None:
            with pytest.raises(WorkerLost):
                await stage.ask(stage.request(PICTURE))

        group.create_task(lose())
        await until(lambda: stage.sandbox.num_running == 1)
        for pid in stage.sandbox.pids:
            os.kill(pid, signal.SIGKILL)
    stage.check(await stage.ask(stage.request(PICTURE)), PICTURE)


async def test_pre_12_another_processor_version_is_refused_naming_both(stage: Stage) -> None:
    await stage.put(PICTURE)
    request = stage.request(PICTURE)
    with pytest.raises(InternalError) as raised:
        await stage.ask(_changed(request, processor_version="k3-image/0"))
    assert "k3-image/0" in raised.value.message
    assert CONFIG.version in raised.value.message


def _changed(request: PreprocessRequest, **fields: object) -> PreprocessRequest:
    known = {name: getattr(request, name) for name in request.__struct_fields__}
    return PreprocessRequest(**{**known, **fields})


def _with_slot(request: PreprocessRequest, **fields: object) -> PreprocessRequest:
    known = {name: getattr(request.slot, name) for name in request.slot.__struct_fields__}
    return _changed(request, slot=ImageSlot(**{**known, **fields}))


async def test_pre_14_a_slot_made_by_other_rules_is_refused_before_any_work(stage: Stage) -> None:
    request = stage.request(PICTURE)
    other_rules = replace(CONFIG, max_patches=512)
    for wrong in (
        _with_slot(request, feature_key=feature_key(content_key(PICTURE), other_rules)),
        _with_slot(request, grid_thw=(1, 2, 2)),
        _changed(request, destination=stage.span(1000)),
    ):
        with pytest.raises(InternalError):
            await stage.ask(wrong)


async def test_a_picture_of_another_size_than_its_slot_is_refused(stage: Stage) -> None:
    await stage.put(PICTURE)
    request = stage.request(PICTURE)
    known = {name: getattr(request.slot.image, name) for name in ImageRef.__struct_fields__}
    image = ImageRef(**{**known, "width": 200, "height": 300})
    wrong = _with_slot(request, image=image, grid_thw=plan(200, 300, CONFIG).grid_thw)
    with pytest.raises(InternalError):
        await stage.ask(wrong)
    stage.check(await stage.ask(request), PICTURE)


async def test_an_encoder_that_is_gone_is_tier_unavailable_and_the_patches_stay(
    stage: Stage,
) -> None:
    await stage.put(PICTURE)
    request = stage.request(PICTURE)
    gone = BufferSpan(session="memory:99", address=1, size_bytes=1 << 24)
    with pytest.raises(TierUnavailable):
        await stage.ask(_changed(request, destination=gone))
    assert outcome(await stage.ask(request)) == ("hit", "local")


async def test_many_requests_for_one_picture_make_it_once(stage: Stage) -> None:
    await stage.put(PICTURE)
    requests = [stage.request(PICTURE, request_id=f"r{number}") for number in range(6)]
    replies = await asyncio.gather(*map(stage.ask, requests))
    found = sorted(map(outcome, replies))
    assert found.count(("miss", "")) == 1
    assert {one[0] for one in found} == {"hit", "miss"}
    assert found.count(("hit", "joined")) >= 1


async def test_a_picture_whose_first_source_fails_is_made_from_the_next_ones(
    stage: Stage,
) -> None:
    holder = PieceHolder("gateway.pieces")
    holder.hold(PICTURE)
    await holder.serve(stage.bus)
    lost = stage.request(PICTURE, request_id="r1", holder="gone.pieces")
    good = stage.request(PICTURE, request_id="r2", holder=holder.subject)
    first, second = await asyncio.gather(stage.ask(lost), stage.ask(good), return_exceptions=True)
    assert isinstance(first, BlobLost)
    assert isinstance(second, PreprocessReply)
    stage.check(second, PICTURE)


async def test_pre_15_cancel_drops_a_queued_picture_and_leaves_others_alone(stage: Stage) -> None:
    slow = encode(gradient(2500, 2500), "PNG")
    for data in (slow, PICTURE, OTHER):
        await stage.put(data)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(stage.ask(stage.request(slow, request_id="busy")))
        await until(lambda: stage.sandbox.num_running == 1)
        dropped = group.create_task(_code(stage.ask(stage.request(PICTURE, request_id="gone"))))
        kept = group.create_task(stage.ask(stage.request(OTHER, request_id="kept")))
        await until(lambda: stage.sandbox.num_waiting == 2)
        stage.handler.cancel(Cancel(request_id="gone"))
        stage.handler.cancel(Cancel(request_id="never heard of"))
        assert await dropped == Cancelled.code
        assert stage.sandbox.num_waiting <= 1
        await running
        await kept
    # One destination serves the whole test, so the picture is asked for again to be looked at.
    stage.check(await stage.ask(stage.request(OTHER, request_id="again")), OTHER)
    assert stage.tier.find_local(feature_key(content_key(PICTURE), CONFIG)) is None


async def _code(call: Awaitable[PreprocessReply]) -> str:
    try:
        await call
    except K3Error as error:
        return error.code
    return ""


async def test_a_cancelled_request_leaves_the_work_to_whoever_shares_it(stage: Stage) -> None:
    slow = encode(gradient(2500, 2500), "PNG")
    await stage.put(slow)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(_code(stage.ask(stage.request(slow, request_id="first"))))
        second = group.create_task(stage.ask(stage.request(slow, request_id="second")))
        await until(lambda: stage.sandbox.num_running == 1 and stage.handler.num_requests == 2)
        stage.handler.cancel(Cancel(request_id="first"))
        assert await first == Cancelled.code
        stage.check(await second, slow)


async def test_a_request_after_the_cancel_of_the_only_one_starts_afresh(stage: Stage) -> None:
    slow = encode(gradient(2500, 2500), "PNG")
    await stage.put(slow)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(_code(stage.ask(stage.request(slow, request_id="first"))))
        await until(lambda: stage.sandbox.num_running == 1)
        stage.handler.cancel(Cancel(request_id="first"))
        again = group.create_task(stage.ask(stage.request(slow, request_id="second")))
        assert await first == Cancelled.code
        stage.check(await again, slow)


async def test_the_task_that_carries_a_request_may_be_cancelled_itself(stage: Stage) -> None:
    slow = encode(gradient(2500, 2500), "PNG")
    await stage.put(slow)
    (before,) = stage.sandbox.pids
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(WAIT_S) as scope:
            async with asyncio.TaskGroup() as group:
                group.create_task(stage.ask(stage.request(slow)))
                await until(lambda: stage.sandbox.num_running == 1)
                scope.reschedule(asyncio.get_running_loop().time())
    await until(lambda: stage.sandbox.num_running == 0 and len(stage.sandbox.pids) == 1)
    assert stage.sandbox.pids != [before]


async def test_nobody_to_fetch_from_is_told_as_it_is(stage: Stage) -> None:
    request = _changed(
        stage.request(PICTURE, url="https://a.example/cat.png"),
        deadline_unix_ns=time.time_ns() + 100_000_000,
    )
    with pytest.raises(NoResponders):
        await stage.ask(request)
