"""The encoder's business: embeddings of images, from tier L3 or computed, pushed to whoever asks.

Enters: `EncodeRequest`s. Leaves: embeddings in the caller's memory, and reports. Always true: one
image is computed once however many ask for it at the same time; a reply leaves after the last byte
lies at its destination; an image that finds no room in the cache is computed without it.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field, replace

from k3_encoder.costs import NO_WORK, Answer, Costs, Work
from k3_encoder.room import Room
from k3_encoder.shelf import Shelf, Stored, checksum_of
from k3_encoder.tower import Tower, TowerJob
from k3core.engine.host_memory import ALIGNMENT_BYTES
from k3core.transfer.base import TransferEngine, Write
from k3wire import subjects
from k3wire.blobs.single_flight import SingleFlight
from k3wire.bus.base import Bus
from k3wire.errors import (
    Cancelled,
    ImageError,
    InternalError,
    InvalidRequest,
    K3Error,
    Overloaded,
    TierUnavailable,
)
from k3wire.messages.base import BufferSpan, StageReport
from k3wire.messages.control import Cancel, WorkerLoad
from k3wire.messages.encode import EncodedItem, EncodeItem, EncodeReply, EncodeRequest
from k3wire.messages.preprocess import PreprocessReply, PreprocessRequest
from k3wire.service.patience import Peers, call_patiently

ITEM_BYTES = {"float32": 4, "bfloat16": 2}

MAX_PATIENCE_S = 60.0
"""Longest wait for another encoder that lives and does not get there."""

Delivered = tuple[EncodedItem, tuple[StageReport, ...]]


@dataclass(frozen=True, slots=True)
class EncoderParts:
    """What the handler works with.

    Attributes:
        bus: to the preprocessors.
        transfer: to the callers' memory.
        tower: the vision model, started.
        shelf: tier L3; its memory is registered with `transfer`.
        pixel_room: memory for patches and uncached embeddings, registered.
        worker_id: of this process.
        fingerprint: of the checkpoint's weights.
        processor_version: of the image rules that this encoder expects.
        preprocessors: the loss of one ends a wait for it.
    """

    bus: Bus
    transfer: TransferEngine
    tower: Tower
    shelf: Shelf
    pixel_room: Room
    worker_id: str
    fingerprint: str
    processor_version: str
    preprocessors: Peers | None = None


@dataclass(frozen=True, slots=True)
class _Got:
    """An entry of the shelf and how it came to be; None where there was no room for it."""

    stored: Stored | None
    detail: str
    work: Work = NO_WORK


@dataclass(slots=True)
class EncoderHandler:
    """Answers encode requests.

    Attributes:
        num_tower_runs: images computed.
    """

    parts: EncoderParts
    num_tower_runs: int = 0
    _flights: SingleFlight[bytes, _Got] = field(default_factory=SingleFlight[bytes, _Got])
    _running: dict[str, set["asyncio.Task[EncodeReply]"]] = field(
        default_factory=dict[str, set["asyncio.Task[EncodeReply]"]]
    )
    _making: set["asyncio.Task[_Got]"] = field(default_factory=set["asyncio.Task[_Got]"])
    _costs: Costs = field(init=False)

    def __post_init__(self) -> None:
        self._costs = Costs(self.parts.worker_id)

    def load(self, rss_bytes: int) -> WorkerLoad:
        """How busy this worker is."""
        return WorkerLoad(
            num_running=self.num_requests,
            num_waiting=self._flights.num_flights,
            tokens_per_s=self._costs.tokens_per_s,
            rss_bytes=rss_bytes,
        )

    @property
    def num_requests(self) -> int:
        """Requests under way."""
        return sum(map(len, self._running.values()))

    def cancel(self, message: Cancel) -> None:
        """Drops what runs for a request; work that others wait for goes on."""
        for task in self._running.get(message.request_id, ()):
            task.cancel()

    async def drain(self) -> None:
        """Waits until nothing is being made, not even for nobody, and nothing shared any more."""
        while self._making:
            await asyncio.wait(set(self._making))
        await self.parts.shelf.settle()

    async def encode(self, request: EncodeRequest) -> EncodeReply:
        """Brings every item's embeddings to its destination.

        Raises:
            Overloaded: the caller serves another checkpoint.
            ImageError: an image cannot be used; names its part.
            Cancelled: the request was cancelled.
            K3Error: a deeper stage failed.
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
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # The caller is told only when nothing is being written for it any more.
            await _stop(task)
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

    async def _one(self, request: EncodeRequest, item: EncodeItem) -> Delivered:
        size = item.slot.num_tokens * self.parts.tower.hidden_size * ITEM_BYTES[request.dtype]
        if item.destination.size_bytes < size:
            raise InternalError("The destination is shorter than the embeddings")
        key = item.slot.feature_key + request.dtype.encode()
        start_unix_ns, started_ns = time.time_ns(), time.perf_counter_ns()
        shelf = self.parts.shelf
        got, stored = _Got(None, "no room"), None
        if shelf.can_hold(key, size):
            shelf.hold(key, size)
            try:
                got = await self._get(request, item, key, size)
                stored = got.stored
                if stored is not None:
                    await self._push(item.destination, shelf.room, stored.span.offset, size)
            finally:
                shelf.let_go(key)
        if stored is None:
            checksum, work = await self._uncached(request, item, size)
            got = _Got(None, got.detail, work)
        else:
            checksum = stored.checksum
        report = self._costs.report(
            Answer(
                detail=got.detail,
                is_kept=stored is not None,
                work=got.work,
                num_tokens=item.slot.num_tokens,
                size_bytes=size,
                start_unix_ns=start_unix_ns,
                spent_ns=time.perf_counter_ns() - started_ns,
            )
        )
        feature_key = item.slot.feature_key
        encoded = EncodedItem(feature_key=feature_key, size_bytes=size, checksum=checksum)
        return encoded, (report, *got.work.reports)

    async def _get(self, request: EncodeRequest, item: EncodeItem, key: bytes, size: int) -> _Got:
        while True:
            stored = self.parts.shelf.find(key)
            if stored is not None:
                return _Got(stored, "local")
            is_joining = self._flights.is_flying(key)
            try:
                got = await self._flights.run(key, lambda: self._fly(request, item, key, size))
            except ImageError as error:
                raise type(error)(error.message, param=item.slot.param or None) from error
            except K3Error:
                # The first asker may have had less time; this one tries again by itself.
                if not is_joining:
                    raise
                continue
            return replace(got, detail="joined", work=Work()) if is_joining else got

    async def _fly(self, request: EncodeRequest, item: EncodeItem, key: bytes, size: int) -> _Got:
        """Makes an entry in a task of its own, which a drain waits for when all have left it."""
        task = asyncio.get_running_loop().create_task(self._make(request, item, key, size))
        self._making.add(task)
        task.add_done_callback(self._making.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await _stop(task)
            raise

    async def _make(self, request: EncodeRequest, item: EncodeItem, key: bytes, size: int) -> _Got:
        """Gets an entry from the shared level or computes it; the shelf owns it afterwards."""
        shelf = self.parts.shelf
        span = shelf.allocate(size)
        if span is None:
            return _Got(None, "no room in one piece")
        detail, work, turn = "shared", Work(), None
        try:
            stored = await shelf.read_shared(key, span, size)
            if stored is None:
                asked_ns = time.perf_counter_ns()
                turn = await shelf.take_turn(key, _patience_s(request))
                work = Work(wait_ns=time.perf_counter_ns() - asked_ns)
                if turn.may_be_late:
                    stored = await shelf.read_shared(key, span, size)
            if stored is None:
                waited_ns = work.wait_ns
                asked_ns, pixel_bytes = time.perf_counter_ns(), self._pixel_bytes(item)
                async with self.parts.pixel_room.span(pixel_bytes, item.slot.param) as pixels:
                    waited_ns += time.perf_counter_ns() - asked_ns
                    view = shelf.view(span, size)
                    work = await self._compute(request, item, pixels.offset, view)
                detail, work = "computed", work.waited(waited_ns)
                stored = await shelf.seal(span, size)
        except BaseException:
            shelf.room.free(span)
            if turn is not None:
                await turn.end()
            raise
        is_kept = shelf.keep(key, stored)
        if turn is not None and is_kept and detail == "computed":
            shelf.share(key, turn)
        elif turn is not None:
            await turn.end()
        return _Got(stored if is_kept else shelf.find(key), detail, work)

    async def _uncached(
        self, request: EncodeRequest, item: EncodeItem, size: int
    ) -> tuple[int, Work]:
        """Computes an image that the shelf has no room for, in the room of patches."""
        room, asked_ns = self.parts.pixel_room, time.perf_counter_ns()
        pixel_bytes = -(-self._pixel_bytes(item) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        # One span for both: two images that each have one and wait for the other would wait long.
        async with room.span(pixel_bytes + size, item.slot.param) as span:
            room_ns = time.perf_counter_ns() - asked_ns
            offset = span.offset + pixel_bytes
            view = room.memory.view(offset, size)
            work = await self._compute(request, item, span.offset, view)
            checksum = await checksum_of(view)
            await self._push(item.destination, room, offset, size)
        return checksum, work.waited(room_ns)

    async def _compute(
        self, request: EncodeRequest, item: EncodeItem, pixel_offset: int, target: memoryview
    ) -> Work:
        """Has patches brought to the room of patches and runs the tower on them."""
        slot, memory = item.slot, self.parts.pixel_room.memory
        pixel_bytes = self._pixel_bytes(item)
        destination = BufferSpan(
            session=self.parts.transfer.session,
            address=memory.address + pixel_offset,
            size_bytes=pixel_bytes,
        )
        started_ns = time.perf_counter_ns()
        reply = await self._preprocess(request, item, destination)
        pixels = memory.view(pixel_offset, pixel_bytes)
        if reply.size_bytes != pixel_bytes or reply.checksum != await checksum_of(pixels):
            raise TierUnavailable("Patches were damaged on the way; try again")
        arrived_ns = time.perf_counter_ns()
        job = TowerJob(pixels, slot.grid_thw, slot.num_tokens, request.dtype, target)
        tower_ns = int(await self.parts.tower.encode(job) * 1e9)
        ended_ns = time.perf_counter_ns()
        self.num_tower_runs += 1
        deeper_ns = arrived_ns - started_ns
        self._costs.learn(slot.num_tokens, deeper_ns + tower_ns)
        return Work(reply.reports, deeper_ns, max(0, ended_ns - arrived_ns - tower_ns))

    async def _preprocess(
        self, request: EncodeRequest, item: EncodeItem, destination: BufferSpan
    ) -> PreprocessReply:
        call = PreprocessRequest(
            request_id=request.request_id,
            slot=item.slot,
            processor_version=self.parts.processor_version,
            destination=destination,
            deadline_unix_ns=request.deadline_unix_ns,
        )
        subject = subjects.shared(subjects.PREPROCESS)
        try:
            return await call_patiently(
                self.parts.bus,
                subject,
                subjects.PREPROCESS,
                call,
                request.deadline_unix_ns,
                self.parts.preprocessors,
            )
        except asyncio.CancelledError:
            # Nobody waits for this image any more; another request's call with this id, if one
            # joined, tries again.
            with contextlib.suppress(K3Error):
                cancel = Cancel(request_id=request.request_id)
                await self.parts.bus.publish(subjects.cancel("preprocessor"), cancel)
            raise

    async def _push(self, destination: BufferSpan, room: Room, offset: int, size: int) -> None:
        write = Write(room.memory.address + offset, destination.address, size)
        await self.parts.transfer.write(destination.session, [write])

    def _pixel_bytes(self, item: EncodeItem) -> int:
        frames, rows, columns = item.slot.grid_thw
        return frames * rows * columns * self.parts.tower.patch_bytes


def _patience_s(request: EncodeRequest) -> float:
    """How long another encoder's work is waited for: as much time is left for one's own."""
    left_s = (request.deadline_unix_ns - time.time_ns()) / 1e9
    return max(0.0, min(MAX_PATIENCE_S, left_s / 2))


async def _stop(task: "asyncio.Task[EncodeReply] | asyncio.Task[_Got]") -> None:
    """Cancels a task and waits for its end; its failure is no news any more."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()


def _first(errors: BaseExceptionGroup[K3Error]) -> K3Error:
    """The first leaf: what failed first cancelled the others."""
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, K3Error)
    return found
