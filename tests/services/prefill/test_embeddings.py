import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest
from support.fake_encoder import FakeEncoder

from k3_prefill.embeddings import EmbeddingDesk, EmbeddingFormat
from k3core.engine.host_memory import HostMemory
from k3core.transfer.base import Region
from k3core.transfer.memory import MemoryFabric
from k3wire.bus.memory import MemoryBus
from k3wire.errors import ImageParseError, RequestTooLarge, TierUnavailable
from k3wire.messages.encode import EncodeItem
from k3wire.messages.media import ImageRef, ImageSlot

WAIT_S = 5.0
ROW_BYTES = 32
MEMORY_BYTES = 4096


def slot(number: int, num_tokens: int = 4, url: str = "") -> ImageSlot:
    key = number.to_bytes(2, "little") * 16
    image = ImageRef(
        content_key=key, media_type="image/png", width=28, height=28, size_bytes=9, url=url
    )
    return ImageSlot(
        image=image, feature_key=key, offset=0, num_tokens=num_tokens, grid_thw=(1, 4, 4)
    )


def rows(item: EncodeItem) -> bytes:
    return bytes([item.slot.feature_key[0] % 256]) * (item.slot.num_tokens * ROW_BYTES)


@dataclass
class Bench:
    desk: EmbeddingDesk
    encoder: FakeEncoder

    async def until_free(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.desk.used_bytes:  # noqa: ASYNC110  # the rest is a timer of the desk's own
                await asyncio.sleep(0.01)


def with_bench(test: Callable[[Bench], Awaitable[None]]) -> None:
    async def run() -> None:
        bus, fabric = MemoryBus(), MemoryFabric()
        transfer, memory = fabric.engine(), HostMemory(MEMORY_BYTES)
        await transfer.register(Region(memory.address, memory.size_bytes))
        desk = EmbeddingDesk(
            bus, memory, transfer.session, EmbeddingFormat(ROW_BYTES, "float32", "weights")
        )
        encoder = FakeEncoder(bus, fabric.engine(), rows)
        await encoder.start()
        async with asyncio.timeout(4 * WAIT_S):
            await test(Bench(desk, encoder))
        desk.close()

    asyncio.run(run())


def deadline() -> int:
    return time.time_ns() + int(WAIT_S * 1e9)


def test_all_images_come_at_once_each_in_its_place() -> None:
    async def test(bench: Bench) -> None:
        slots = [slot(1), slot(2, 7), slot(1)]
        found = await bench.desk.fetch("r", slots, deadline())
        assert [bytes(view) for view in found.views] == [
            b"\x01" * 128,
            b"\x02" * (7 * ROW_BYTES),
            b"\x01" * 128,
        ]
        (asked,) = bench.encoder.requests
        assert (asked.dtype, asked.weights_fingerprint) == ("float32", "weights")
        assert [report.stage for report in found.reports] == ["encoder"]
        bench.desk.free(found)
        assert bench.desk.used_bytes == 0

    with_bench(test)


def test_more_images_than_a_message_holds_go_in_several() -> None:
    async def test(bench: Bench) -> None:
        slots = [slot(number, 1, url="https://host/" + "x" * 20_000) for number in range(40)]
        found = await bench.desk.fetch("r", slots, deadline())
        assert 1 < max(len(request.items) for request in bench.encoder.requests) < 4
        asked = [item.slot for request in bench.encoder.requests for item in request.items]
        assert sorted(s.feature_key for s in asked) == sorted(s.feature_key for s in slots)
        assert [bytes(view[:1])[0] for view in found.views] == list(range(40))

    with_bench(test)


def test_many_images_are_shared_among_the_encoders() -> None:
    async def test(bench: Bench) -> None:
        slots = [slot(number, 1) for number in range(20)]
        found = await bench.desk.fetch("r", slots, deadline())
        assert sorted(len(request.items) for request in bench.encoder.requests) == [4, 8, 8]
        assert [bytes(view[:1])[0] for view in found.views] == list(range(20))

    with_bench(test)


def test_an_encoders_error_is_the_requests_and_the_room_comes_back_after_a_rest() -> None:
    async def test(bench: Bench) -> None:
        bench.encoder.error = ImageParseError("The picture is cut short.", param="messages[0]")
        with pytest.raises(ImageParseError) as caught:
            await bench.desk.fetch("r", [slot(1)], deadline())
        assert caught.value.param == "messages[0]"
        assert bench.desk.used_bytes > 0
        assert bench.encoder.cancels == ["r"]
        await bench.until_free()

    with_bench(test)


def test_damaged_bytes_are_never_handed_out() -> None:
    async def test(bench: Bench) -> None:
        bench.encoder.is_lying = True
        with pytest.raises(TierUnavailable):
            await bench.desk.fetch("r", [slot(1)], deadline())
        await bench.until_free()

    with_bench(test)


def test_a_cancelled_fetch_tells_the_encoder_and_rests_its_room() -> None:
    async def test(bench: Bench) -> None:
        bench.encoder.gate.clear()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(bench.desk.fetch("r", [slot(1)], deadline()))
            while not bench.encoder.requests:  # noqa: ASYNC110  # the fake has no event for it
                await asyncio.sleep(0)
            task.cancel()
        assert bench.desk.used_bytes > 0
        assert bench.encoder.cancels == ["r"]
        await bench.until_free()

    with_bench(test)


def test_a_fetch_without_room_waits_for_another_to_end() -> None:
    async def test(bench: Bench) -> None:
        most = MEMORY_BYTES // ROW_BYTES
        first = await bench.desk.fetch("a", [slot(1, most)], deadline())
        async with asyncio.TaskGroup() as group:
            second = group.create_task(bench.desk.fetch("b", [slot(2, most)], deadline()))
            await asyncio.sleep(0)
            assert not second.done()
            bench.desk.free(first)
        assert bytes(second.result().views[0][:1]) == b"\x02"

    with_bench(test)


def test_images_that_never_fit_are_refused_at_once() -> None:
    async def test(bench: Bench) -> None:
        with pytest.raises(RequestTooLarge):
            await bench.desk.fetch("r", [slot(1, MEMORY_BYTES // ROW_BYTES + 1)], deadline())
        assert bench.encoder.requests == []

    with_bench(test)
