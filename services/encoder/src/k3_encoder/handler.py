"""The encoder's business: embeddings of images, from tier L3 or computed, pushed to whoever asks.

Enters: `EncodeRequest`s. Leaves: embeddings in the caller's memory, and reports. Always true: one
image is computed once however many ask for it at the same time; an entry that is being written,
read or shared is not put out; an image larger than the cache is computed without it.
"""

import asyncio
import logging
import time
import zlib
from dataclasses import dataclass, field

from k3_encoder.room import Room
from k3_encoder.tower import Tower, TowerJob
from k3core.engine.host_memory import Span
from k3core.scheduler.embeddings import EmbeddingCache
from k3core.transfer.base import ObjectStore, Region, TransferEngine, Write
from k3wire import subjects
from k3wire.blobs.single_flight import SingleFlight
from k3wire.bus.base import Bus
from k3wire.errors import (
    Cancelled,
    InternalError,
    InvalidRequest,
    K3Error,
    Overloaded,
    TierUnavailable,
)
from k3wire.messages.base import BufferSpan, StageReport
from k3wire.messages.control import Cancel, WorkerLoad
from k3wire.messages.encode import EncodedItem, EncodeItem, EncodeReply, EncodeRequest
from k3wire.messages.preprocess import PreprocessRequest
from k3wire.service.patience import call_patiently

logger = logging.getLogger(__name__)

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
LOOP_BYTES = 256 * 1024
"""Longest span that is summed on the loop; about a tenth of a millisecond."""

COST_WEIGHT = 0.2
"""Weight of the newest measurement in the moving average of the cost of a token."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Embeddings that lie in L3's memory."""

    span: Span
    size_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Made:
    """How an entry came to be."""

    stored: Stored
    detail: str
    reports: tuple[StageReport, ...]


@dataclass(frozen=True, slots=True)
class EncoderParts:
    """What the handler works with.

    Attributes:
        bus: to the preprocessors.
        transfer: to the callers' memory.
        store: shared tier behind L3, or None.
        tower: the vision model.
        cache_room: memory of L3, registered.
        pixel_room: memory for patches and uncached embeddings, registered.
        worker_id: of this process.
        fingerprint: of the checkpoint's weights.
        processor_version: of the image rules that this encoder expects.
    """

    bus: Bus
    transfer: TransferEngine
    store: ObjectStore | None
    tower: Tower
    cache_room: Room
    pixel_room: Room
    worker_id: str
    fingerprint: str
    processor_version: str


@dataclass(slots=True)
class EncoderHandler:
    """Answers encode requests."""

    parts: EncoderParts
    cache: EmbeddingCache
    _ready: dict[bytes, Stored] = field(default_factory=dict[bytes, Stored])
    _flights: SingleFlight[bytes, Made] = field(default_factory=SingleFlight[bytes, Made])
    _running: dict[str, set["asyncio.Task[EncodeReply]"]] = field(
        default_factory=dict[str, set["asyncio.Task[EncodeReply]"]]
    )
    _shares: set["asyncio.Task[None]"] = field(default_factory=set["asyncio.Task[None]"])
    _ns_per_token: float = 0.0
    num_tower_runs: int = 0

    def load(self, rss_bytes: int) -> WorkerLoad:
        """How busy this worker is."""
        return WorkerLoad(
            num_running=sum(map(len, self._running.values())),
            num_waiting=self._flights.num_flights,
            tokens_per_s=1e9 / self._ns_per_token if self._ns_per_token else 0.0,
            rss_bytes=rss_bytes,
        )

    def cancel(self, message: Cancel) -> None:
        """Drops what runs for a request; work that others wait for goes on."""
        for task in self._running.get(message.request_id, ()):
            task.cancel()

    async def drain(self) -> None:
        """Waits until nothing is being shared any more."""
        while self._shares:
            await asyncio.wait(set(self._shares))

    async def encode(self, request: EncodeRequest) -> EncodeReply:
        """Brings every item's embeddings to its destination.

        Raises:
            Overloaded: the caller serves another checkpoint.
            K3Error: an image cannot be used, or a deeper stage failed.
        """
        if request.weights_fingerprint != self.parts.fingerprint:
            raise Overloaded(
                f"This encoder has checkpoint {self.parts.fingerprint}, not "
                f"{request.weights_fingerprint}"
            )
        if request.dtype not in ITEM_BYTES:
            raise InvalidRequest(f"Embeddings of type {request.dtype[:20]} are not made here")
        task = asyncio.get_running_loop().create_task(self._encode_all(request))
        running = self._running.setdefault(request.request_id, set())
        running.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            task.cancel()
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise Cancelled("The request was cancelled") from None
        finally:
            running.discard(task)
            if not running:
                self._running.pop(request.request_id, None)

    async def _encode_all(self, request: EncodeRequest) -> EncodeReply:
        try:
            async with asyncio.TaskGroup() as group:
                jobs = [group.create_task(self._one(request, item)) for item in request.items]
        except* K3Error as errors:
            raise _first(errors) from None
        results = [job.result() for job in jobs]
        return EncodeReply(
            items=tuple(item for item, _ in results),
            reports=tuple(report for _, reports in results for report in reports),
        )

    async def _one(
        self, request: EncodeRequest, item: EncodeItem
    ) -> tuple[EncodedItem, tuple[StageReport, ...]]:
        size = item.slot.num_tokens * self.parts.tower.hidden_size * ITEM_BYTES[request.dtype]
        if item.destination.size_bytes < size:
            raise InternalError("The destination is shorter than the embeddings")
        key = item.slot.feature_key + request.dtype.encode()
        start_unix_ns, started_ns = time.time_ns(), time.perf_counter_ns()
        if size > self.cache.capacity or not self.cache.can_acquire(key, size):
            return await self._uncached(request, item, size, start_unix_ns)
        self.cache.acquire(key, size)
        self._free_dropped()
        try:
            stored = self._ready.get(key)
            made: Made | None = None
            if stored is None:
                made = await self._flights.run(key, lambda: self._make(request, item, key, size))
                stored = made.stored
            await self._push(item.destination, stored)
        finally:
            self.cache.release(key)
        spent_ns = time.perf_counter_ns() - started_ns
        report = self._report(item, made, start_unix_ns, spent_ns, size)
        encoded = EncodedItem(
            feature_key=item.slot.feature_key, size_bytes=size, checksum=stored.checksum
        )
        return encoded, (report, *(made.reports if made else ()))

    def _report(
        self,
        item: EncodeItem,
        made: Made | None,
        start_unix_ns: int,
        spent_ns: int,
        size: int,
    ) -> StageReport:
        deeper_ns = sum(report.duration_ns for report in made.reports) if made else 0
        is_hit = made is None or made.detail == "shared"
        return StageReport(
            stage="encoder",
            tier="L3",
            outcome="hit" if is_hit else "miss",
            worker_id=self.parts.worker_id,
            start_unix_ns=start_unix_ns,
            duration_ns=max(0, spent_ns - deeper_ns),
            saved_ns=max(0, int(self._ns_per_token * item.slot.num_tokens) - spent_ns)
            if is_hit
            else 0,
            size_bytes=size,
            num_hits=int(is_hit),
            detail=made.detail if made else "local",
        )

    def _free_dropped(self) -> None:
        for key in self.cache.drain_dropped():
            stored = self._ready.pop(key, None)
            if stored is not None:
                self.parts.cache_room.free(stored.span)

    async def _make(self, request: EncodeRequest, item: EncodeItem, key: bytes, size: int) -> Made:
        room = self.parts.cache_room
        span = room.try_allocate(size)
        if span is None:
            raise TierUnavailable("The embedding cache has no room in one piece; try again")
        try:
            view = room.memory.view(span.offset, size)
            region = Region(room.memory.address + span.offset, size)
            name = self._name(key)
            if self.parts.store is not None and (await self.parts.store.get([(name, region)]))[0]:
                detail, reports = "shared", ()
            else:
                reports = await self._compute(request, item, view)
                detail = "computed"
            stored = Stored(span, size, await _checksum(view))
        except BaseException:
            room.free(span)
            raise
        self._ready[key] = stored
        if detail == "computed":
            self._share(key, name, region, size)
        return Made(stored, detail, reports)

    def _name(self, key: bytes) -> str:
        return f"l3/{self.parts.fingerprint}/{key.hex()}"

    def _share(self, key: bytes, name: str, region: Region, size: int) -> None:
        store = self.parts.store
        if store is None:
            return
        # The entry must stay as it is until the store has copied it.
        self.cache.acquire(key, size)

        async def share() -> None:
            try:
                await store.put([(name, region)])
            finally:
                self.cache.release(key)

        task = asyncio.get_running_loop().create_task(share())
        self._shares.add(task)
        task.add_done_callback(self._shares.discard)

    async def _uncached(
        self, request: EncodeRequest, item: EncodeItem, size: int, start_unix_ns: int
    ) -> tuple[EncodedItem, tuple[StageReport, ...]]:
        started_ns = time.perf_counter_ns()
        room = self.parts.pixel_room
        async with room.span(size, item.slot.param) as span:
            view = room.memory.view(span.offset, size)
            reports = await self._compute(request, item, view)
            checksum = await _checksum(view)
            write = Write(room.memory.address + span.offset, item.destination.address, size)
            await self.parts.transfer.write(item.destination.session, [write])
        spent_ns = time.perf_counter_ns() - started_ns
        report = StageReport(
            stage="encoder",
            tier="L3",
            outcome="bypass",
            worker_id=self.parts.worker_id,
            start_unix_ns=start_unix_ns,
            duration_ns=max(0, spent_ns - sum(report.duration_ns for report in reports)),
            size_bytes=size,
            detail="larger than the cache's free room",
        )
        encoded = EncodedItem(feature_key=item.slot.feature_key, size_bytes=size, checksum=checksum)
        return encoded, (report, *reports)

    async def _compute(
        self, request: EncodeRequest, item: EncodeItem, target: memoryview
    ) -> tuple[StageReport, ...]:
        slot, parts = item.slot, self.parts
        started_ns = time.perf_counter_ns()
        frames, rows, columns = slot.grid_thw
        pixel_size = frames * rows * columns * parts.tower.patch_bytes
        async with parts.pixel_room.span(pixel_size, slot.param) as span:
            destination = BufferSpan(
                session=parts.transfer.session,
                address=parts.pixel_room.memory.address + span.offset,
                size_bytes=pixel_size,
            )
            call = PreprocessRequest(
                request_id=request.request_id,
                slot=slot,
                processor_version=parts.processor_version,
                destination=destination,
                deadline_unix_ns=request.deadline_unix_ns,
            )
            reply = await call_patiently(
                parts.bus,
                subjects.shared(subjects.PREPROCESS),
                subjects.PREPROCESS,
                call,
                request.deadline_unix_ns,
            )
            pixels = parts.pixel_room.memory.view(span.offset, pixel_size)
            if reply.size_bytes != pixel_size or reply.checksum != await _checksum(pixels):
                raise TierUnavailable("Patches were damaged on the way; try again")
            job = TowerJob(pixels, slot.grid_thw, slot.num_tokens, request.dtype, target)
            await parts.tower.encode(job)
        self.num_tower_runs += 1
        cost = (time.perf_counter_ns() - started_ns) / slot.num_tokens
        last = self._ns_per_token or cost
        self._ns_per_token = last + COST_WEIGHT * (cost - last)
        return reply.reports

    async def _push(self, destination: BufferSpan, stored: Stored) -> None:
        address = self.parts.cache_room.memory.address + stored.span.offset
        write = Write(address, destination.address, stored.size_bytes)
        await self.parts.transfer.write(destination.session, [write])


async def _checksum(view: memoryview) -> int:
    if len(view) <= LOOP_BYTES:
        return zlib.crc32(view)
    return await asyncio.to_thread(zlib.crc32, view)


def _first(errors: BaseExceptionGroup[K3Error]) -> K3Error:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, K3Error)
    return found
