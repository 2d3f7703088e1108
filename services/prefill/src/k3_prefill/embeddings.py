"""Image embeddings on their way in: room in registered memory, and the encoder asked for them.

What always holds: bytes handed out were checked against the encoder's checksum, and room is not
given to another request while an encoder may still write into it. A call that ended well wrote
what it will; after one that failed or was given up the room rests for `REST_S` first, and the
encoder is told to stop.
"""

import asyncio
import logging
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from k3core.engine.host_memory import HostMemory, Span, SpanAllocator
from k3wire import subjects
from k3wire.bus.base import Bus
from k3wire.errors import InternalError, K3Error, RequestTooLarge, TierUnavailable
from k3wire.messages.base import PIECE_BYTES, BufferSpan, StageReport
from k3wire.messages.control import Cancel
from k3wire.messages.encode import EncodedItem, EncodeItem, EncodeReply, EncodeRequest
from k3wire.messages.media import ImageSlot
from k3wire.service.patience import Peers, call_patiently

logger = logging.getLogger(__name__)

_LOOP_BYTES = 256 * 1024
"""Longest span that is summed on the loop; about a tenth of a millisecond."""

MAX_ITEMS = 8
"""Pictures of one call: several encoders share a long request, and one that dies costs few."""

REST_S = 0.5
"""Rest of abandoned room. An encoder that was told to stop ends its write well within."""


@dataclass(frozen=True, slots=True)
class EmbeddingFormat:
    """What embeddings look like in memory.

    Attributes:
        row_bytes: bytes of one token's embedding.
        dtype: element type as the encoder names it.
        weights_fingerprint: of the checkpoint they come from.
    """

    row_bytes: int
    dtype: str
    weights_fingerprint: str


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Embeddings of one request's images, all in place.

    Attributes:
        views: one for each slot asked for, in order; valid until `EmbeddingDesk.free`.
        spans: the room they take.
        reports: of every stage that was asked.
        wait_ns: from the call to the last reply.
    """

    views: tuple[memoryview, ...]
    spans: tuple[Span, ...]
    reports: tuple[StageReport, ...]
    wait_ns: int


class EmbeddingDesk:
    """Asks encoders for embeddings and keeps the memory they deliver into."""

    def __init__(
        self,
        bus: Bus,
        memory: HostMemory,
        session: str,
        embedding_format: EmbeddingFormat,
        encoders: Peers | None = None,
    ) -> None:
        """Takes over a memory that is registered with the data plane under `session`.

        The loss of one of `encoders` ends a wait for it.
        """
        self._bus = bus
        self._encoders = encoders
        self._memory = memory
        self._session = session
        self._format = embedding_format
        self._allocator = SpanAllocator(memory.size_bytes)
        self._freed = asyncio.Event()
        self._resting: dict[Span, asyncio.TimerHandle] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes taken now, resting ones included."""
        return self._allocator.used_bytes

    async def fetch(
        self, request_id: str, slots: Sequence[ImageSlot], deadline_unix_ns: int
    ) -> Embeddings:
        """Brings the embeddings of some images, all at once; waits for room.

        The caller bounds the wait and owns the result's room until it frees it. When cancelled
        or failing, nothing stays taken but for the rest.

        Raises:
            RequestTooLarge: the images never fit.
            K3Error: what an encoder answered.
        """
        start_ns = time.perf_counter_ns()
        spans = await self._room(slots)
        try:
            replies = await self._ask_all(request_id, slots, spans, deadline_unix_ns)
            pairs = list(zip(slots, spans, strict=True))
            views = tuple([await self._checked(slot, span, replies) for slot, span in pairs])
        except BaseException:
            await self._abandon(request_id, spans)
            raise
        reports = tuple(report for reply in replies for report in reply.reports)
        return Embeddings(views, tuple(spans), reports, time.perf_counter_ns() - start_ns)

    def free(self, embeddings: Embeddings) -> None:
        """Gives the room of read embeddings back at once."""
        for span in embeddings.spans:
            self._give_back(span)

    def close(self) -> None:
        """Stops the timers of resting room."""
        for timer in self._resting.values():
            timer.cancel()
        self._resting.clear()

    async def _room(self, slots: Sequence[ImageSlot]) -> list[Span]:
        """Takes room for all images or for none."""
        sizes = [slot.num_tokens * self._format.row_bytes for slot in slots]
        if sum(sizes) > self._allocator.size_bytes:
            raise RequestTooLarge("The request has more image tokens than this server can hold.")
        while True:
            spans = [self._allocator.allocate(size) for size in sizes]
            taken = [span for span in spans if span is not None]
            if len(taken) == len(sizes):
                return taken
            for span in taken:
                self._allocator.free(span)
            if not self._allocator.used_bytes:
                raise RequestTooLarge("The request's images do not fit this server's memory.")
            self._freed.clear()
            await self._freed.wait()

    async def _ask_all(
        self,
        request_id: str,
        slots: Sequence[ImageSlot],
        spans: Sequence[Span],
        deadline_unix_ns: int,
    ) -> list[EncodeReply]:
        items = [
            EncodeItem(slot=slot, destination=self._destination(slot, span))
            for slot, span in zip(slots, spans, strict=True)
        ]
        requests = [
            EncodeRequest(
                request_id=request_id,
                items=tuple(group),
                dtype=self._format.dtype,
                weights_fingerprint=self._format.weights_fingerprint,
                deadline_unix_ns=deadline_unix_ns,
            )
            for group in _message_groups(items)
        ]
        try:
            async with asyncio.TaskGroup() as group:
                calls = [group.create_task(self._ask(request)) for request in requests]
        except* K3Error as errors:
            raise _first(errors) from errors
        return [call.result() for call in calls]

    async def _ask(self, request: EncodeRequest) -> EncodeReply:
        subject = subjects.shared(subjects.ENCODE)
        return await call_patiently(
            self._bus, subject, subjects.ENCODE, request, request.deadline_unix_ns, self._encoders
        )

    def _destination(self, slot: ImageSlot, span: Span) -> BufferSpan:
        return BufferSpan(
            session=self._session,
            address=self._memory.address + span.offset,
            size_bytes=slot.num_tokens * self._format.row_bytes,
        )

    async def _checked(
        self, slot: ImageSlot, span: Span, replies: Sequence[EncodeReply]
    ) -> memoryview:
        """The bytes of one image, if they are the ones the encoder wrote."""
        size_bytes = slot.num_tokens * self._format.row_bytes
        view = self._memory.view(span.offset, size_bytes)
        item = _item_of(slot, replies)
        if item.size_bytes != size_bytes:
            raise InternalError("The encoder delivered embeddings of another size.")
        # A large picture takes milliseconds to sum, which the loop must not spend.
        is_long = size_bytes > _LOOP_BYTES
        found = await asyncio.to_thread(zlib.crc32, view) if is_long else zlib.crc32(view)
        if found != item.checksum:
            raise TierUnavailable("Image embeddings were damaged on the way; try again.")
        return view

    async def _abandon(self, request_id: str, spans: Sequence[Span]) -> None:
        loop = asyncio.get_running_loop()
        for span in spans:
            self._resting[span] = loop.call_later(REST_S, self._end_rest, span)
        try:
            await self._bus.publish(subjects.cancel("encoder"), Cancel(request_id=request_id))
        except K3Error as error:
            logger.warning("encoder not told to stop", extra={"code": error.code})

    def _end_rest(self, span: Span) -> None:
        del self._resting[span]
        self._give_back(span)

    def _give_back(self, span: Span) -> None:
        self._allocator.free(span)
        self._freed.set()


def _message_groups(items: Sequence[EncodeItem]) -> list[list[EncodeItem]]:
    """Splits items so that each group fits one message and one encoder's attention, in order."""
    groups: list[list[EncodeItem]] = [[]]
    room = PIECE_BYTES
    for item in items:
        size = len(msgspec.msgpack.encode(item))
        if groups[-1] and (size > room or len(groups[-1]) == MAX_ITEMS):
            groups.append([])
            room = PIECE_BYTES
        groups[-1].append(item)
        room -= size
    return groups


def _item_of(slot: ImageSlot, replies: Sequence[EncodeReply]) -> EncodedItem:
    for reply in replies:
        for item in reply.items:
            if item.feature_key == slot.feature_key:
                return item
    raise InternalError("The encoder left out an image.")


def _first(errors: BaseExceptionGroup[K3Error]) -> K3Error:
    """The first leaf: what failed first cancelled the others."""
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, K3Error)
    return found
