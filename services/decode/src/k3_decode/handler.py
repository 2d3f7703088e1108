"""The door of the decode worker: room for prompts, and tokens until they end.

Calls are idempotent by (request id, attempt): a repeated reservation gets the same grant, a
repeated commit the same answer. A newer attempt replaces an older one. Nothing that a prefill
worker may still write to is granted again before it has rested.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from k3_decode.seat import REST_S, Seat, key_of
from k3core.engine.core import EngineCore
from k3core.engine.frames import FrameSender, gateway_of
from k3core.engine.thread import EngineThread
from k3core.engine.words import EngineEvent, EngineRequest
from k3core.scheduler.request import ImageSpan, Request
from k3core.transfer.page_exchange import Arena, check_layouts, checksum, make_grant, unpack_ids
from k3wire.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    K3Error,
    Overloaded,
    ShuttingDown,
    SlowDown,
    WorkerLost,
)
from k3wire.messages.base import Admitted
from k3wire.messages.control import Cancel, Heartbeat, WorkerLoad
from k3wire.messages.decode import CommitRequest, ReserveReply, ReserveRequest
from k3wire.messages.pages import PageLayoutInfo
from k3wire.messages.prompt import PromptPayload, PromptSource
from k3wire.telemetry import metrics

logger = logging.getLogger(__name__)

NUM_REMEMBERED = 4096
"""Ended or cancelled attempts that are remembered, so that a late message does nothing."""

_LOOP_BYTES = 256 * 1024
"""Longest state that is summed on the loop; about a tenth of a millisecond."""


@dataclass(frozen=True, slots=True)
class Worker:
    """The parts of this worker.

    Attributes:
        worker_id: this process.
        epoch: its start.
        engine: the thread that computes.
        core: what runs on it; only touched through `engine`, its `load` aside.
        arena: where its pages lie.
        layout: what a prefill worker's pages must look like.
        view_page: the bytes of one page.
        read_prompt: a prompt source and its deadline to the prompt.
        sender: what publishes deltas.
        max_requests: seats at a time; more are refused.
    """

    worker_id: str
    epoch: int
    engine: EngineThread[EngineEvent]
    core: EngineCore
    arena: Arena
    layout: PageLayoutInfo
    view_page: Callable[[int], memoryview]
    read_prompt: Callable[[PromptSource, int], Awaitable[PromptPayload]]
    sender: FrameSender
    max_requests: int


class DecodeHandler:
    """Reserves room, takes requests over and streams their tokens."""

    def __init__(self, worker: Worker) -> None:
        """Joins the parts; nothing runs before `run`."""
        self._worker = worker
        self._seats: dict[str, Seat] = {}
        self._newest: dict[str, int] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def run(self) -> None:
        """Publishes frames until it is cancelled."""
        try:
            await self._worker.sender.run()
        finally:
            for timer in self._timers.values():
                timer.cancel()

    async def reserve(self, request: ReserveRequest) -> ReserveReply:
        """Makes room for a prompt.

        Raises:
            ShuttingDown: draining.
            Overloaded: the two workers' pages differ, or the engine is down.
            SlowDown: no room now.
            DeadlineExceeded: the message came too late.
            Cancelled: this attempt was cancelled or replaced already.
        """
        key = key_of(request.request_id, request.attempt)
        seat = self._seats.get(key)
        if seat is not None and seat.grant is not None and seat.state != "resting":
            return ReserveReply(grant=seat.grant)
        if seat is not None or key in self._ended or request.request_id in self._ended:
            raise Cancelled("This attempt was given up or is being reserved.")
        if self._newest.get(request.request_id, -1) > request.attempt:
            raise Cancelled("A newer attempt of this request is known.")
        self._check_can_reserve(request)
        self._give_up_older(request)
        return await self._take_seat(Seat(request))

    async def commit(self, request: CommitRequest) -> Admitted:
        """Lets a request run whose pages are all in place.

        Raises:
            Cancelled: there is no such reservation any more.
            WorkerLost: the pages are not what was sent.
        """
        admitted = Admitted(worker_id=self._worker.worker_id, epoch=self._worker.epoch)
        seat = self._seats.get(key_of(request.request_id, request.attempt))
        if seat is not None and seat.state in ("committing", "running"):
            return admitted
        if seat is None or seat.state != "reserved":
            raise Cancelled("The reservation was given up.")
        seat.state = "committing"
        try:
            await self._check_pages(seat, request)
            # Before the engine knows: its first token may be heard before its answer is.
            seat.start(request.report)
            adopt = partial(self._worker.core.adopt, seat.key, request.first_token_id)
            is_adopted = await self._worker.engine.call(adopt)
        except BaseException:
            self._leave(seat)
            raise
        if not is_adopted or seat.is_cancelled:
            self._leave(seat)
            raise Cancelled("The request was cancelled.")
        return admitted

    def cancel(self, message: Cancel) -> None:
        """Gives a request up, or remembers that it must not start.

        A gateway cancels all attempts. A prefill worker cancels one, and then writes no more.
        """
        if message.attempt is None:
            # All of its attempts, the ones that have not come yet too.
            self._remember(message.request_id)
            attempt = self._newest.get(message.request_id, 0)
        else:
            attempt = message.attempt
        key = key_of(message.request_id, attempt)
        seat = self._seats.get(key)
        if seat is None:
            if message.attempt is not None:
                self._remember(key)
        elif message.attempt is not None and seat.state in ("reserved", "resting"):
            self._leave(seat)
        else:
            self._give_up(seat)

    def worker_left(self, beat: Heartbeat) -> None:
        """Hears that a worker fell silent; what a prefill worker reserved is given up.

        One that drains beats until it is gone, so its silence means the same.
        """
        if beat.role != "prefill":
            return
        for seat in list(self._seats.values()):
            is_its = seat.request.prefill_worker_id == beat.worker_id
            if is_its and seat.state in ("reserving", "reserved"):
                logger.warning(
                    "reservation dropped, prefill worker lost",
                    extra={"request_id": seat.request.request_id},
                )
                self._give_up(seat)

    def hear(self, events: tuple[EngineEvent, ...]) -> None:
        """Turns the events of one step into deltas and ends the step for the stream."""
        for event in events:
            seat = self._seats.get(event.key)
            if seat is None:
                continue
            if event.kind == "tokens":
                self._tell(seat, event)
            elif event.kind == "failed":
                self._tell_error(seat, event.error or InternalError("The engine failed."))
        self._worker.sender.flush()

    def fail_all(self) -> None:
        """Ends every stream: the engine is down, and another worker must go on."""
        for seat in list(self._seats.values()):
            self._tell_error(seat, WorkerLost("The worker of this answer failed; try again."))
        self._worker.sender.flush()

    def load(self, rss_bytes: int) -> WorkerLoad:
        """The worker's figures for its heartbeat."""
        engine = self._worker.core.load
        metrics.PAGES.set(engine.num_pages)
        metrics.PAGES_FREE.set(engine.num_free_pages)
        active: dict[str, int] = {}
        for seat in self._seats.values():
            gateway = gateway_of(seat.request.stream_subject)
            active[gateway] = active.get(gateway, 0) + 1
        num_running = sum(seat.state == "running" for seat in self._seats.values())
        return WorkerLoad(
            num_running=num_running,
            num_waiting=len(self._seats) - num_running,
            num_queued_tokens=engine.num_queued_tokens,
            num_free_pages=engine.num_free_pages,
            num_pages=engine.num_pages,
            tokens_per_s=engine.tokens_per_s,
            active_by_gateway=active,
            rss_bytes=rss_bytes,
        )

    async def drain(self) -> None:
        """Takes no more and returns when every answer is out; the caller bounds it."""
        self._is_draining = True
        await self._is_idle.wait()
        await self._worker.sender.wait_sent()

    def _check_can_reserve(self, request: ReserveRequest) -> None:
        if self._is_draining:
            raise ShuttingDown("This worker is shutting down; try another.")
        if not self._worker.engine.is_running:
            raise Overloaded("This worker is not ready.")
        check_layouts(self._worker.layout, request.layout)
        if request.deadline_unix_ns <= time.time_ns():
            raise DeadlineExceeded("The request came after its deadline.")
        if len(self._seats) >= self._worker.max_requests:
            raise SlowDown("Too many answers are running; try again.", retry_after_s=1.0)

    async def _take_seat(self, seat: Seat) -> ReserveReply:
        request, worker = seat.request, self._worker
        self._seats[seat.key] = seat
        self._newest[request.request_id] = request.attempt
        self._is_idle.clear()
        try:
            payload = await worker.read_prompt(request.prompt, request.deadline_unix_ns)
            reserve = partial(worker.core.reserve, _engine_request(seat, payload))
            reservation = await worker.engine.call(reserve)
            if seat.is_cancelled:
                raise Cancelled("The request was cancelled.")
            if reservation is None:
                raise SlowDown("No room for this prompt now; try again.", retry_after_s=1.0)
        except BaseException:
            # Nobody was told of the pages, so they need no rest; and the same attempt may ask
            # again, unless it was cancelled.
            self._leave(seat)
            if not seat.is_cancelled:
                del self._ended[seat.key]
            raise
        seat.state_pages = reservation.state_pages
        seat.grant = make_grant(
            worker.arena, reservation.units, reservation.state_pages, reservation.num_resident
        )
        seat.state = "reserved"
        self._arm(seat)
        return ReserveReply(grant=seat.grant)

    def _arm(self, seat: Seat) -> None:
        """Starts the deadline's timer."""
        left_s = (seat.request.deadline_unix_ns - time.time_ns()) / 1e9
        loop = asyncio.get_running_loop()
        self._timers[seat.key] = loop.call_later(left_s, self._expire, seat)

    def _expire(self, seat: Seat) -> None:
        if seat.state == "running":
            error = DeadlineExceeded("The answer took longer than its deadline allows.")
            self._tell_error(seat, error)
            self._worker.sender.flush()
        else:
            self._give_up(seat)

    async def _check_pages(self, seat: Seat, request: CommitRequest) -> None:
        if request.num_tokens != seat.request.num_prompt_tokens:
            raise WorkerLost("The hand-over covers another length; try again.")
        views = [self._worker.view_page(page) for page in seat.state_pages]
        is_long = sum(view.nbytes for view in views) > _LOOP_BYTES
        found = await asyncio.to_thread(checksum, views) if is_long else checksum(views)
        if found != request.checksum:
            raise WorkerLost("The handed-over state was damaged on the way; try again.")

    def _tell(self, seat: Seat, event: EngineEvent) -> None:
        delta = seat.delta(event.token_ids)
        assert delta.position == event.position, "the engine and the seat count alike"
        if event.finish_reason is not None:
            report = seat.report(self._worker.worker_id)
            metrics.STAGE_DURATION.labels("decode").observe(report.duration_ns / 1e9)
            delta = msgspec.structs.replace(
                delta, finish_reason=event.finish_reason, reports=(*delta.reports, report)
            )
            self._forget(seat)
        self._worker.sender.add(seat.request.stream_subject, delta)

    def _tell_error(self, seat: Seat, error: K3Error) -> None:
        """Ends a stream with an error, if it is this worker's to end, and frees everything."""
        if seat.state == "running":
            delta = msgspec.structs.replace(
                seat.delta(()), finish_reason="error", error=error.to_info()
            )
            self._worker.sender.add(seat.request.stream_subject, delta)
        self._leave(seat)

    def _give_up_older(self, request: ReserveRequest) -> None:
        attempt = self._newest.get(request.request_id)
        older = None if attempt is None else self._seats.get(key_of(request.request_id, attempt))
        if older is not None:
            self._give_up(older)

    def _give_up(self, seat: Seat) -> None:
        """Lets go of a seat in any state, as soon as nobody may write to it."""
        seat.is_cancelled = True
        if seat.state == "running":
            self._leave(seat)
        elif seat.state == "reserved":
            seat.state = "resting"
            self._stop_timer(seat)
            loop = asyncio.get_running_loop()
            self._timers[seat.key] = loop.call_later(REST_S, self._leave, seat)

    def _leave(self, seat: Seat) -> None:
        """Frees a seat's pages and forgets it."""
        self._worker.engine.post(partial(self._worker.core.abort, seat.key))
        self._forget(seat)

    def _forget(self, seat: Seat) -> None:
        self._remember(seat.key)
        self._stop_timer(seat)
        self._seats.pop(seat.key, None)
        if self._newest.get(seat.request.request_id) == seat.request.attempt:
            del self._newest[seat.request.request_id]
        if not self._seats:
            self._is_idle.set()

    def _stop_timer(self, seat: Seat) -> None:
        timer = self._timers.pop(seat.key, None)
        if timer is not None:
            timer.cancel()

    def _remember(self, key: str) -> None:
        self._ended[key] = None
        while len(self._ended) > NUM_REMEMBERED:
            self._ended.popitem(last=False)


def _engine_request(seat: Seat, payload: PromptPayload) -> EngineRequest:
    request = seat.request
    tokens = unpack_ids(payload.token_ids)
    if len(tokens) != request.num_prompt_tokens:
        raise InternalError("The prompt is not as long as it was said to be.")
    left = request.sampling.max_tokens - request.num_emitted_tokens
    return EngineRequest(
        request=Request(
            request_id=seat.key,
            tokens=tokens,
            max_new_tokens=max(1, left),
            images=tuple(
                ImageSpan(slot.offset, slot.num_tokens, slot.feature_key)
                for slot in payload.image_slots
            ),
            salt=request.cache_salt,
            adapter=request.adapter,
            markers=payload.mark_offsets,
        ),
        sampling=request.sampling,
        num_emitted_tokens=request.num_emitted_tokens,
    )
