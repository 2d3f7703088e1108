"""An encoder that writes known bytes, late, wrong or never, as a test wants."""

import asyncio
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from k3core.engine.host_memory import HostMemory
from k3core.transfer.base import Region, TransferEngine, Write
from k3wire import subjects
from k3wire.bus.base import Bus, Headers
from k3wire.errors import K3Error
from k3wire.messages.base import StageReport
from k3wire.messages.control import Cancel
from k3wire.messages.encode import EncodedItem, EncodeItem, EncodeReply, EncodeRequest


@dataclass
class FakeEncoder:
    """Answers `EncodeRequest`s.

    Attributes:
        bus: where it answers.
        transfer: what it writes with.
        embed: bytes of one image's embeddings.
        gate: replies wait for it; set at first.
        error: raised in place of a reply.
        is_lying: the checksum it tells is wrong.
        requests: all it was asked.
        cancels: request ids it was told to drop.
    """

    bus: Bus
    transfer: TransferEngine
    embed: Callable[[EncodeItem], bytes]
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    error: K3Error | None = None
    is_lying: bool = False
    requests: list[EncodeRequest] = field(default_factory=list[EncodeRequest])
    cancels: list[str] = field(default_factory=list[str])

    async def start(self) -> None:
        """Begins to serve."""
        self.gate.set()
        self._memory = HostMemory(1 << 20)
        await self.transfer.register(Region(self._memory.address, self._memory.size_bytes))
        await self.bus.serve(
            subjects.shared(subjects.ENCODE), subjects.ENCODE, self._encode, queue="encoder"
        )
        await self.bus.listen(subjects.cancel("encoder"), Cancel, self._cancel)

    def _cancel(self, message: Cancel) -> None:
        self.cancels.append(message.request_id)

    async def _encode(self, request: EncodeRequest, headers: Headers) -> EncodeReply:
        self.requests.append(request)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        items = [await self._deliver(item) for item in request.items]
        report = StageReport(
            stage="encoder",
            tier="L3",
            outcome="miss",
            worker_id="encoder-fake",
            start_unix_ns=1,
            duration_ns=1,
            num_items=len(items),
        )
        return EncodeReply(items=tuple(items), reports=(report,))

    async def _deliver(self, item: EncodeItem) -> EncodedItem:
        data = self.embed(item)
        self._memory.view(0, len(data))[:] = data
        span = item.destination
        await self.transfer.write(
            span.session, [Write(self._memory.address, span.address, len(data))]
        )
        return EncodedItem(
            feature_key=item.slot.feature_key,
            size_bytes=len(data),
            checksum=zlib.crc32(data) ^ int(self.is_lying),
        )
