"""A preprocessor that writes known patches, late, wrong or never, as a test wants."""

import asyncio
import hashlib
import zlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from k3core.engine.host_memory import HostMemory
from k3core.transfer.base import Region, TransferEngine, Write
from k3wire import subjects
from k3wire.bus.base import Bus, Headers
from k3wire.errors import K3Error
from k3wire.messages.base import StageReport
from k3wire.messages.control import Cancel
from k3wire.messages.media import ImageRef, ImageSlot
from k3wire.messages.preprocess import PreprocessReply, PreprocessRequest

PATCH = 14


def slot_of(name: str, rows: int = 2, columns: int = 2) -> ImageSlot:
    """A picture of so many patches, known by its name."""
    digest = hashlib.sha256(name.encode()).digest()
    image = ImageRef(
        content_key=digest,
        media_type="image/png",
        width=columns * PATCH,
        height=rows * PATCH,
        size_bytes=1,
    )
    return ImageSlot(
        image=image,
        feature_key=digest,
        offset=0,
        num_tokens=rows * columns // 4,
        grid_thw=(1, rows, columns),
        param=name,
    )


def patches_of(slot: ImageSlot) -> npt.NDArray[np.float32]:
    """The patches of a picture: [N, 3, P, P]."""
    seed = int.from_bytes(slot.feature_key[:8], "big")
    _, rows, columns = slot.grid_thw
    shape = (rows * columns, 3, PATCH, PATCH)
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@dataclass
class FakePreprocessor:
    """Answers `PreprocessRequest`s.

    Attributes:
        bus: where it answers.
        transfer: what it writes with.
        gate: replies wait for it; set at first.
        errors: raised in place of the next replies, in order.
        is_lying: the checksum it tells is wrong.
        requests: all it was asked.
        asked: set at every request, for a test to clear and wait for.
        cancels: request ids it was told to drop.
    """

    bus: Bus
    transfer: TransferEngine
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    errors: list[K3Error] = field(default_factory=list[K3Error])
    is_lying: bool = False
    requests: list[PreprocessRequest] = field(default_factory=list[PreprocessRequest])
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    cancels: list[str] = field(default_factory=list[str])

    async def start(self) -> None:
        """Begins to serve."""
        self.gate.set()
        self._memory = HostMemory(1 << 20)
        self._turn = asyncio.Lock()
        await self.transfer.register(Region(self._memory.address, self._memory.size_bytes))
        subject = subjects.shared(subjects.PREPROCESS)
        await self.bus.serve(subject, subjects.PREPROCESS, self._answer, queue="preprocessor")
        await self.bus.listen(subjects.cancel("preprocessor"), Cancel, self._cancel)

    @property
    def names(self) -> list[str]:
        """The pictures it was asked for."""
        return [request.slot.param for request in self.requests]

    def _cancel(self, message: Cancel) -> None:
        self.cancels.append(message.request_id)

    async def _answer(self, request: PreprocessRequest, headers: Headers) -> PreprocessReply:
        self.requests.append(request)
        self.asked.set()
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)
        data = patches_of(request.slot).tobytes()
        span = request.destination
        async with self._turn:
            self._memory.view(0, len(data))[:] = data
            write = Write(self._memory.address, span.address, len(data))
            await self.transfer.write(span.session, [write])
        report = StageReport(
            stage="preprocessor",
            tier="L2",
            outcome="miss",
            worker_id="preprocessor-fake",
            start_unix_ns=1,
            duration_ns=1,
        )
        return PreprocessReply(
            grid_thw=request.slot.grid_thw,
            size_bytes=len(data),
            checksum=zlib.crc32(data) ^ int(self.is_lying),
            reports=(report,),
        )
