"""One request's way through a prefill worker, from its admission to the release of its pages.

    read the prompt ─► engine: L4 lookup ─► chunks ─────────────► first token ─► stream
                         │                    │ ▲                     │
                         │ reserve on decode  │ └ embeddings, all     ├► state, commit ─► release
                         └─ at once           └► finished pages pushed┘   at once

Whatever ends the journey early (an error, a cancel, the deadline, a lost worker) frees the
engine's pages, the embeddings' room and the reservation, once; an error also ends the stream.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from opentelemetry.trace import INVALID_SPAN, Span

from k3_prefill.embeddings import EmbeddingDesk, Embeddings
from k3_prefill.hand_off import DecodeLink
from k3_prefill.savings import saved_ns
from k3core.engine.core import EngineCore
from k3core.engine.thread import EngineThread
from k3core.engine.words import EngineEvent, EngineRequest
from k3core.scheduler.request import ImageSpan, Request
from k3core.transfer.page_exchange import unpack_ids
from k3wire.errors import DeadlineExceeded, InternalError, K3Error, ShuttingDown
from k3wire.messages.base import StageReport
from k3wire.messages.decode import ReserveRequest
from k3wire.messages.pages import PageGrant, PageLayoutInfo
from k3wire.messages.prefill import PrefillRequest
from k3wire.messages.prompt import PromptPayload, PromptSource
from k3wire.messages.stream import TokenDelta
from k3wire.telemetry import metrics
from k3wire.telemetry.tracing import Tracing, note_report

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Worker:
    """What every journey through this worker shares.

    Attributes:
        worker_id: this process.
        engine: the thread that computes.
        core: what runs on it; only touched through `engine`, its `load` aside.
        link: the way to decode workers.
        desk: the way to encoders; None where pictures change nothing.
        layout: of this worker's pages, compared before anything moves.
        read_prompt: a prompt source and its deadline to the prompt.
        tracing: one span a journey.
        send: puts a delta of a stream into the frame of the running step.
        flush: ends that step.
    """

    worker_id: str
    engine: EngineThread[EngineEvent]
    core: EngineCore
    link: DecodeLink
    desk: EmbeddingDesk | None
    layout: PageLayoutInfo
    read_prompt: Callable[[PromptSource, int], Awaitable[PromptPayload]]
    tracing: Tracing
    send: Callable[[str, TokenDelta], None]
    flush: Callable[[], None]


class Journey:
    """One attempt of one request. `run` is its task; the loop calls `hear` in between."""

    def __init__(self, worker: Worker, request: PrefillRequest) -> None:
        """Prepares the journey of a request that was admitted just now."""
        self.request = request
        self.key = f"{request.request_id}#{request.attempt}"
        self._worker = worker
        self._inbox: deque[EngineEvent] = deque()
        self._has_event: asyncio.Future[None] | None = None
        self._start_unix_ns = time.time_ns()
        self._start_ns = time.perf_counter_ns()
        self._admitted_ns = 0
        self._encode_wait_ns = 0
        self._encode_reports: tuple[StageReport, ...] = ()
        self._cached: EngineEvent | None = None
        self._payload = PromptPayload(token_ids=b"")
        self._embeddings: list[Embeddings] = []
        self._is_reserving = False
        self._is_granted = False
        self._is_in_engine = False
        self._num_sent_tokens = 0
        self._span: Span = INVALID_SPAN

    async def run(self) -> None:
        """Travels to the end; every failure but a cancel ends on the stream."""
        left_s = (self.request.deadline_unix_ns - time.time_ns()) / 1e9
        error: K3Error | None = None
        try:
            with self._worker.tracing.span("prefill run") as self._span:
                async with asyncio.timeout(left_s):
                    await self._travel()
        except TimeoutError:
            error = DeadlineExceeded("The request took longer than its deadline allows.")
        except K3Error as failure:
            error = failure
        except Exception as failure:
            logger.exception(
                "prefill journey failed", extra={"request_id": self.request.request_id}
            )
            error = InternalError("The request failed inside the server.")
            error.__cause__ = failure
        finally:
            await self._clean_up()
        if error is not None:
            self._tell_error(error)

    def hear(self, event: EngineEvent) -> None:
        """Takes an event of the engine; the first token goes to the stream at once.

        Only a request that has nowhere to go on yet waits for its reservation, since a gateway
        that has seen a token can no longer try elsewhere.
        """
        if event.kind == "admitted":
            self._admitted_ns = event.at_ns
            self._cached = event
        elif event.kind == "prefilled":
            self._release_embeddings()
            if self._is_granted or event.finish_reason is not None:
                self._tell_first_token(event)
        self._inbox.append(event)
        if self._has_event is not None and not self._has_event.done():
            self._has_event.set_result(None)

    async def _next_event(self) -> EngineEvent:
        while not self._inbox:
            self._has_event = asyncio.get_running_loop().create_future()
            await self._has_event
        return self._inbox.popleft()

    async def _travel(self) -> None:
        self._payload = await self._worker.read_prompt(
            self.request.prompt, self.request.deadline_unix_ns
        )
        submit = partial(self._worker.core.submit, self._engine_request())
        if not self._worker.engine.post(submit):
            raise ShuttingDown("This worker is shutting down; try another.")
        self._is_in_engine = True
        try:
            async with asyncio.TaskGroup() as group:
                await self._follow(group)
        except* K3Error as errors:
            raise _first(errors) from errors

    async def _follow(self, group: asyncio.TaskGroup) -> None:
        """Acts on the engine's events until the request is somebody else's."""
        sampling = self.request.sampling
        reservation: asyncio.Task[PageGrant] | None = None
        if sampling.max_tokens - self.request.num_emitted_tokens > 1:
            self._is_reserving = True
            reservation = group.create_task(self._reserve())
        pushed = _Pushed()
        while True:
            event = await self._next_event()
            match event.kind:
                case "admitted" if event.images and self._worker.desk is not None:
                    group.create_task(self._bring_images(self._worker.desk, event.images))
                case "progress" if reservation is not None:
                    await self._push_units(pushed, await reservation, event)
                case "prefilled":
                    await self._finish(pushed, event, reservation)
                    return
                case "failed":
                    self._is_in_engine = False
                    raise event.error or InternalError("The engine gave up the request.")
                case _:
                    pass

    async def _finish(
        self, pushed: "_Pushed", event: EngineEvent, reservation: asyncio.Task[PageGrant] | None
    ) -> None:
        """Hands the request over, unless its first token was its last."""
        hand_off = event.hand_off
        assert hand_off is not None, "a prefilled request holds its pages"
        if event.finish_reason is None and reservation is not None:
            grant = await reservation
            if not self._num_sent_tokens:
                self._tell_first_token(event)
                self._worker.flush()
            start_unix_ns, start_ns = time.time_ns(), time.perf_counter_ns()
            link = self._worker.link
            position = pushed.num_units * self._worker.layout.unit_tokens
            units = hand_off.units[pushed.num_units :]
            pushed.size_bytes += await link.push_rest(grant, hand_off, units, position)
            report = StageReport(
                stage="prefill",
                outcome="bypass",
                worker_id=self._worker.worker_id,
                start_unix_ns=start_unix_ns,
                duration_ns=time.perf_counter_ns() - start_ns,
                size_bytes=pushed.size_bytes,
                num_items=len(hand_off.units) + len(hand_off.state_pages),
                detail="hand-off",
            )
            await link.commit(self.request.decode_worker_id, self.request, hand_off, report)
            self._is_reserving = False
        elif reservation is not None:
            # Its answer no longer matters, whatever it is; the clean-up gives the room back.
            reservation.cancel()
        self._is_in_engine = False
        self._worker.engine.post(partial(self._worker.core.release, self.key))

    async def _push_units(self, pushed: "_Pushed", grant: PageGrant, event: EngineEvent) -> None:
        assert event.position == pushed.num_units * self._worker.layout.unit_tokens
        pushed.size_bytes += await self._worker.link.push_units(grant, event.units, event.position)
        pushed.num_units += len(event.units)

    async def _reserve(self) -> PageGrant:
        request = self.request
        message = ReserveRequest(
            request_id=request.request_id,
            attempt=request.attempt,
            prefill_worker_id=self._worker.worker_id,
            num_prompt_tokens=len(self._payload.token_ids) // 4,
            prompt=request.prompt,
            sampling=request.sampling,
            num_emitted_tokens=request.num_emitted_tokens,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            layout=self._worker.layout,
            stream_subject=request.stream_subject,
            deadline_unix_ns=request.deadline_unix_ns,
        )
        grant = await self._worker.link.reserve(request.decode_worker_id, message)
        self._is_granted = True
        return grant

    async def _bring_images(self, desk: EmbeddingDesk, images: tuple[int, ...]) -> None:
        slots = [self._payload.image_slots[index] for index in images]
        embeddings = await desk.fetch(self.request.request_id, slots, self.request.deadline_unix_ns)
        self._embeddings.append(embeddings)
        self._encode_wait_ns += embeddings.wait_ns
        self._encode_reports += embeddings.reports
        for index, view in zip(images, embeddings.views, strict=True):
            self._worker.engine.post(
                partial(self._worker.core.provide_image, self.key, index, view)
            )

    def _engine_request(self) -> EngineRequest:
        request = self.request
        return EngineRequest(
            request=Request(
                request_id=self.key,
                tokens=unpack_ids(self._payload.token_ids),
                max_new_tokens=1,
                images=tuple(
                    ImageSpan(slot.offset, slot.num_tokens, slot.feature_key)
                    for slot in self._payload.image_slots
                ),
                salt=request.cache_salt,
                adapter=request.adapter,
                markers=self._payload.mark_offsets,
            ),
            sampling=request.sampling,
            num_emitted_tokens=request.num_emitted_tokens,
        )

    def _tell_first_token(self, event: EngineEvent) -> None:
        cached = self._cached.usage if self._cached else None
        num_cached = cached.cached_local + cached.cached_remote if cached else 0
        self._num_sent_tokens = len(event.token_ids)
        report = self._report(num_cached)
        self._note(report)
        self._worker.send(
            self.request.stream_subject,
            TokenDelta(
                request_id=self.request.request_id,
                attempt=self.request.attempt,
                position=event.position,
                token_ids=event.token_ids,
                finish_reason=event.finish_reason,
                reports=(*self._encode_reports, report),
                num_cached_tokens=num_cached,
            ),
        )

    def _report(self, num_cached: int) -> StageReport:
        """What L4 gave and what the rest took; waiting for the encoder is the encoder's."""
        now_ns = time.perf_counter_ns()
        num_tokens = len(self._payload.token_ids) // 4
        unit_tokens = self._worker.layout.unit_tokens
        longest = (num_tokens - 1) // unit_tokens * unit_tokens
        costs = self._worker.core.load.costs
        slots = self._payload.image_slots
        wait_ns = max(0, self._admitted_ns - self._start_ns)
        elapsed_ns = now_ns - self._start_ns - wait_ns - self._encode_wait_ns
        outcome = "miss" if not num_cached else "hit" if num_cached >= longest else "partial"
        return StageReport(
            stage="prefill",
            tier="L4",
            outcome=outcome,
            worker_id=self._worker.worker_id,
            start_unix_ns=self._start_unix_ns,
            duration_ns=max(0, elapsed_ns),
            wait_ns=wait_ns,
            saved_ns=saved_ns(costs, unit_tokens, num_tokens, slots, num_cached),
            num_items=num_tokens,
            num_hits=num_cached,
            detail="local" if num_cached else "",
        )

    def _note(self, report: StageReport) -> None:
        """Tells the trace and the counters what the stage did."""
        note_report(self._span, report)
        metrics.TIER_LOOKUPS.labels(report.tier, report.outcome).inc()
        metrics.TIER_SAVED.labels(report.tier).inc(report.saved_ns / 1e9)
        metrics.STAGE_DURATION.labels(report.stage).observe(report.duration_ns / 1e9)
        usage = self._cached.usage if self._cached else None
        if usage is not None and usage.reuse_gap:
            metrics.REUSE_GAP_TOKENS.labels(usage.gap_reason).inc(usage.reuse_gap)

    def _tell_error(self, error: K3Error) -> None:
        self._worker.send(
            self.request.stream_subject,
            TokenDelta(
                request_id=self.request.request_id,
                attempt=self.request.attempt,
                position=self.request.num_emitted_tokens + self._num_sent_tokens,
                finish_reason="error",
                error=error.to_info(),
            ),
        )
        self._worker.flush()

    async def _clean_up(self) -> None:
        """Frees whatever is still held; each thing once."""
        is_engine_reading = False
        if self._is_in_engine:
            self._is_in_engine = False
            loop = asyncio.get_running_loop()
            # The step that runs now may be reading the embeddings: the engine lets go first.
            after = partial(loop.call_soon_threadsafe, self._release_embeddings)
            is_engine_reading = self._worker.engine.post(
                partial(_abort, self._worker.core, self.key, after)
            )
        if not is_engine_reading:
            self._release_embeddings()
        if self._is_reserving:
            self._is_reserving = False
            await self._worker.link.cancel(self.request)

    def _release_embeddings(self) -> None:
        taken, self._embeddings = self._embeddings, []
        for embeddings in taken:
            assert self._worker.desk is not None, "embeddings come from a desk"
            self._worker.desk.free(embeddings)


@dataclass(slots=True)
class _Pushed:
    """How much of a hand-off was written.

    Attributes:
        num_units: leading units of the prompt.
        size_bytes: bytes in all.
    """

    num_units: int = 0
    size_bytes: int = 0


def _abort(core: EngineCore, key: str, after: Callable[[], object]) -> None:
    """On the engine's thread: lets go of a request, then says so."""
    core.abort(key)
    after()


def _first(errors: BaseExceptionGroup[K3Error]) -> K3Error:
    """The first leaf: what failed first cancelled the others."""
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, K3Error)
    return found
