"""An encoder with a real tower, a preprocessor that a test directs, and a caller's memory."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from support.fake_preprocessor import FakePreprocessor, patches_of, slot_of
from support.golden_model import MICRO_A, golden

from k3_encoder.handler import EncoderHandler, EncoderParts
from k3_encoder.room import Room
from k3_encoder.shelf import Shelf
from k3_encoder.tower import Tower
from k3core.engine.host_memory import HostMemory
from k3core.model.vision import VisionModel
from k3core.transfer.base import ObjectStore, Region, TransferEngine
from k3core.transfer.memory import MemoryFabric
from k3core.weights.loading import LoadOptions
from k3core.weights.vision_loading import load_vision_model
from k3wire.blobs.base import BlobStore
from k3wire.bus.memory import MemoryBus
from k3wire.messages.base import BufferSpan, StageReport
from k3wire.messages.encode import EncodeItem, EncodeReply, EncodeRequest
from k3wire.messages.media import ImageSlot

WAIT_S = 10.0
WIDTH = 64
CHECKPOINT = "micro"
PREFIX = f"l3/{CHECKPOINT}/"
TOKEN_BYTES = 4 * WIDTH


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
            weights_fingerprint=self.handler.parts.fingerprint,
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
    store: ObjectStore | None,
    cache_bytes: int,
    pixel_bytes: int,
    fabric: MemoryFabric,
    turns: BlobStore | None = None,
    checkpoint: str = CHECKPOINT,
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
        shelf=Shelf(cache_room, store, f"l3/{checkpoint}/", turns),
        pixel_room=pixel_room,
        worker_id="encoder-test",
        fingerprint=checkpoint,
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
    checkpoints: Sequence[str] = (),
) -> None:
    """Runs a test on a bench; with several stores, on one bench after the other.

    Args:
        test: what to run.
        cache_bytes: of the encoder's cache.
        pixel_bytes: of its room for pixels.
        stores: shared stores, one a bench.
        checkpoints: what each bench says it serves; the same for all unless named.
    """

    names = checkpoints or (CHECKPOINT,) * len(stores)

    async def run() -> None:
        torch.set_num_threads(1)
        for store, checkpoint in zip(stores, names, strict=True):
            fabric = MemoryFabric()
            bench = await open_bench(store, cache_bytes, pixel_bytes, fabric, None, checkpoint)
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
