"""One preprocessor with a real sandbox, and everything around it in memory."""

import asyncio
import contextlib
import time
import zlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import numpy as np
from support.pictures import encode, gradient

from k3_preprocessor.delivery import Delivery
from k3_preprocessor.handler import Parts, PreprocessHandler
from k3_preprocessor.patch_tier import PatchTier
from k3_preprocessor.sources import ByteSource
from k3_preprocessor.windows import Windows
from k3core.engine.host_memory import HostMemory
from k3core.transfer.base import Region
from k3core.transfer.memory import MemoryFabric, MemoryObjectStore, MemoryTransferEngine
from k3text.images.config import ProcessorConfig
from k3text.images.geometry import plan
from k3text.images.header import ImageLimits, read_header
from k3text.images.keys import content_key, feature_key
from k3text.images.processor import process
from k3text.images.sandbox import Sandbox, SandboxConfig
from k3wire import subjects
from k3wire.blobs.image_keys import image_bytes_key
from k3wire.blobs.memory_store import MemoryBlobStore
from k3wire.bus.base import Headers
from k3wire.bus.memory import MemoryBus
from k3wire.messages.base import BufferSpan, StageReport
from k3wire.messages.fetch import ReadReply, ReadRequest
from k3wire.messages.media import ImageRef, ImageSlot
from k3wire.messages.preprocess import PreprocessReply, PreprocessRequest
from k3wire.service.pieces import PieceHolder

CONFIG = ProcessorConfig(max_patches=4096)
PICTURE = encode(gradient(300, 200), "PNG")
OTHER = encode(gradient(200, 300), "PNG")


def request_for(
    data: bytes, destination: BufferSpan, *, request_id: str = "r1", **image: str
) -> PreprocessRequest:
    """A request as a gateway, a prefill worker and an encoder would make it."""
    header = read_header(data)
    geometry = plan(header.width, header.height, CONFIG)
    content = content_key(data)
    reference = ImageRef(
        content_key=content,
        media_type=header.media_type,
        width=header.width,
        height=header.height,
        size_bytes=len(data),
        **image,
    )
    slot = ImageSlot(
        image=reference,
        feature_key=feature_key(content, CONFIG),
        offset=0,
        num_tokens=geometry.num_tokens,
        grid_thw=geometry.grid_thw,
        param="messages[0].content[1].image_url",
    )
    return PreprocessRequest(
        request_id=request_id,
        slot=slot,
        processor_version=CONFIG.version,
        destination=destination,
        deadline_unix_ns=time.time_ns() + 60_000_000_000,
    )


@dataclass
class Stage:
    """One preprocessor and what surrounds it."""

    bus: MemoryBus
    blobs: MemoryBlobStore
    store: MemoryObjectStore
    fabric: MemoryFabric
    windows: Windows
    tier: PatchTier
    sandbox: Sandbox
    handler: PreprocessHandler
    encoder: MemoryTransferEngine
    memory: HostMemory
    reads: list[ReadRequest] = field(default_factory=list[ReadRequest])

    def span(self, size_bytes: int | None = None) -> BufferSpan:
        size_bytes = self.memory.size_bytes if size_bytes is None else size_bytes
        return BufferSpan(
            session=self.encoder.session, address=self.memory.address, size_bytes=size_bytes
        )

    def request(self, data: bytes, *, request_id: str = "r1", **image: str) -> PreprocessRequest:
        return request_for(data, self.span(), request_id=request_id, **image)

    async def put(self, data: bytes) -> None:
        """Puts encoded bytes into tier L1."""
        await self.blobs.put(image_bytes_key(content_key(data)), data, ttl_s=60)

    async def ask(self, request: PreprocessRequest) -> PreprocessReply:
        return await self.handler.preprocess(request)

    def delivered(self, reply: PreprocessReply) -> np.ndarray:
        """What lies in the encoder's memory, checked like an encoder checks it."""
        view = self.memory.view(0, reply.size_bytes)
        assert zlib.crc32(view) == reply.checksum
        return np.frombuffer(view, np.float32).reshape(-1, 3, 14, 14)

    def check(self, reply: PreprocessReply, data: bytes) -> None:
        """Holds what was delivered to the picture."""
        expected = process(data, CONFIG)
        assert reply.grid_thw == expected.grid_thw
        np.testing.assert_array_equal(self.delivered(reply), expected.patches)

    def wipe(self) -> None:
        """Puts rubbish where the patches were."""
        view = self.memory.view(0, self.memory.size_bytes)
        view[:] = b"\xa5" * self.memory.size_bytes

    async def serve_fetcher(self, data: bytes, holder: PieceHolder) -> None:
        """A fetcher that holds bytes itself."""

        async def read(request: ReadRequest, _: Headers) -> ReadReply:
            self.reads.append(request)
            report = StageReport(
                stage="fetcher", tier="L1", outcome="hit", worker_id="fetcher-1",
                start_unix_ns=0, duration_ns=1,
            )  # fmt: skip
            return ReadReply(blob=holder.hold(data), report=report)

        await self.bus.serve(subjects.shared(subjects.READ), subjects.READ, read)
        await holder.serve(self.bus)


@contextlib.asynccontextmanager
async def open_stage(
    store: MemoryObjectStore | None = None, cache_bytes: int = 1 << 26, max_waiting: int = 8
) -> AsyncGenerator[Stage]:
    fabric, store, bus = MemoryFabric(), store or MemoryObjectStore(), MemoryBus()
    blobs = MemoryBlobStore()
    engine, encoder = fabric.engine(), fabric.engine()
    # Windows of thirteen patches: no image ends where a window does.
    windows = Windows(13 * 3 * 14 * 14 * 4 + 100, 3)
    await engine.register(windows.region)
    await store.register(windows.region)
    memory = HostMemory(1 << 24)
    await encoder.register(Region(memory.address, memory.size_bytes))
    tier = PatchTier(cache_bytes, windows, store)
    async with (
        Sandbox(CONFIG, ImageLimits(), SandboxConfig(1, max_waiting)) as sandbox,
        asyncio.TaskGroup() as group,
    ):
        sharing = group.create_task(tier.share())
        parts = Parts(
            worker_id="preprocessor-1",
            config=CONFIG,
            sandbox=sandbox,
            source=ByteSource(bus, blobs),
            tier=tier,
            delivery=Delivery(engine, windows, CONFIG),
        )
        handler = PreprocessHandler(parts)
        yield Stage(bus, blobs, store, fabric, windows, tier, sandbox, handler, encoder, memory)
        assert windows.num_free == 3
        assert handler.num_requests == 0
        sharing.cancel()
