"""One engine: requests in, steps through a scheduler and a runner, events out.

What enters are requests and words about them (images that arrived, aborts, releases); what
leaves are the events of each step. A step is: plan, run, commit, tell. Steps do not overlap, so
between two of them nothing is in flight and an abort frees at once.

What always holds: every request that was added or adopted ends in exactly one last event (a
finish, or `failed`), unless it was aborted or, on a prefill worker, released; after that event
the engine knows nothing of it. Tokens of a request do not depend on its neighbours: rows are
sampled each for itself, and the model's batch invariance is stated in `k3core.model.text`.

The class runs on the engine's thread only; see `k3core.engine.thread`.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from k3core.cache.spec import CacheError
from k3core.cache.stats import CacheStats
from k3core.engine.finish import finish_reason
from k3core.engine.live import LiveRequest, Meter
from k3core.engine.runner import ModelRunner
from k3core.engine.words import (
    Adoption,
    EngineEvent,
    EngineLoad,
    EngineRequest,
    EventKind,
    RowError,
)
from k3core.scheduler.plan import Event, HandOff, Reservation, RowPlan, RowResult, StepPlan
from k3core.scheduler.scheduler import Scheduler
from k3wire.errors import ContextLengthExceeded, InvalidRequest, K3Error
from k3wire.messages.sampling import FinishReason

_TOO_LONG = "The prompt does not fit into this server's cache. Send a shorter prompt."


class EngineCore:
    """The engine of one worker, of any role; the scheduler's configuration says which."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes over both; neither may be used by anyone else afterwards."""
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._live: dict[str, LiveRequest] = {}
        self._waiting: list[str] = []
        self._on_hold: set[str] = set()
        self._events: list[EngineEvent] = []
        self._meter = Meter(scheduler.config, scheduler.cache)

    def open(self) -> None:
        """Opens the runner."""
        self._runner.open()
        self._meter.publish(self._live.values(), self._clock(), is_idle=True)

    def close(self) -> None:
        """Closes the runner."""
        self._runner.close()

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is; may be read from any thread."""
        return self._meter.load

    @property
    def cache_stats(self) -> CacheStats:
        """The prefix cache's counters; exact between two steps."""
        return self._scheduler.cache.stats

    @property
    def is_quiescent(self) -> bool:
        """Whether no request is known."""
        return not self._live

    def submit(self, request: EngineRequest) -> None:
        """Queues a request; a refusal comes as its `failed` event."""
        try:
            self.add(request)
        except K3Error as error:
            self._events.append(EngineEvent(kind="failed", key=request.key, error=error))

    def add(self, request: EngineRequest) -> None:
        """Queues a request.

        Raises:
            ContextLengthExceeded: it could never fit.
            InvalidRequest: an image lies outside the prompt.
            K3Error: the runner refuses it.
        """
        assert request.key not in self._live, "a key is used once at a time"
        self._runner.begin(request, None)
        is_on_hold = request.key in self._runner.held(self._clock())
        try:
            refusal = self._scheduler.add(request.request, is_on_hold)
        except CacheError as error:
            self._runner.forget(request.key)
            raise InvalidRequest("The prompt and its images do not fit together.") from error
        if refusal is not None:
            self._runner.forget(request.key)
            raise ContextLengthExceeded(_TOO_LONG)
        self._live[request.key] = LiveRequest(request, position=request.num_emitted_tokens)
        self._waiting.append(request.key)
        if is_on_hold:
            self._on_hold.add(request.key)

    def reserve(self, request: EngineRequest) -> Reservation | None:
        """Makes room for a prompt that is computed elsewhere; None if it does not fit now.

        Raises:
            ContextLengthExceeded: it could never fit.
        """
        assert request.key not in self._live, "a key is used once at a time"
        try:
            reservation = self._scheduler.reserve(request.request)
        except CacheError as error:
            raise ContextLengthExceeded(_TOO_LONG) from error
        if reservation is not None:
            live = LiveRequest(request, position=request.num_emitted_tokens, is_admitted=True)
            live.num_computed = live.num_prompt_tokens
            live.state_pages = reservation.state_pages
            self._live[request.key] = live
        return reservation

    def adopt(self, key: str, first_token: int) -> bool:
        """Lets a reserved request run, its pages filled; False if it is not known any more.

        Raises:
            K3Error: the runner finds the state unusable; the reservation is still there.
        """
        live = self._live.get(key)
        if live is None:
            return False
        self._runner.begin(live.request, Adoption(first_token, live.state_pages))
        live.position += 1
        for event in self._scheduler.adopt(key, first_token):
            assert event.kind == "finished", "nothing else can come of an adoption"
            self._end_short(key)
        return True

    def provide_image(self, key: str, index: int, data: memoryview) -> bool:
        """Takes one image's embeddings; False if the request is not known any more."""
        if key not in self._live:
            return False
        self._runner.provide_image(key, index, data)
        self._scheduler.set_embedding_ready(key, index)
        self._live[key].provided_images.add(index)
        return True

    def abort(self, key: str) -> bool:
        """Forgets a request in any state and frees what it held; False if it is not known."""
        is_known = self._live.pop(key, None) is not None
        if is_known:
            self._scheduler.close_transfer(key)
            self._scheduler.abort(key)
            self._let_go(key)
        return is_known

    def release(self, key: str) -> bool:
        """Ends a prefilled request: its state stays in the prefix cache, its pins are gone."""
        live = self._live.pop(key, None)
        if live is None:
            return False
        assert live.is_held, "only a prefilled request is released"
        self._scheduler.close_transfer(key)
        self._scheduler.release(key)
        self._let_go(key)
        return True

    def step(self, tell: Callable[[tuple[EngineEvent, ...]], None]) -> float | None:
        """Plans, runs and commits one step, if there is anything to run; see `thread.Core.step`.

        Which pictures new requests need is told before the pass, so that they are fetched while
        the text before them is computed.
        """
        now_s = self._clock()
        held = self._runner.held(now_s)
        for key in [key for key in self._on_hold if key not in held]:
            self._on_hold.discard(key)
            self._scheduler.let_go(key)
        plan = self._scheduler.schedule(held.keys())
        self._announce_admissions()
        if any(event.images for event in self._events):
            self._hand_over_events(tell)
        if plan.rows:
            self._run(plan, now_s)
        else:
            # Admitted without a row yet (a picture is missing): its copies happen all the same.
            self._runner.execute(plan)
            self._end_outgrown(plan.events)
        self._meter.publish(self._live.values(), now_s, is_idle=not plan.rows)
        self._hand_over_events(tell)
        return 0.0 if plan.rows else min(held.values(), default=None)

    def _hand_over_events(self, tell: Callable[[tuple[EngineEvent, ...]], None]) -> None:
        if self._events:
            events, self._events = tuple(self._events), []
            tell(events)

    def _run(self, plan: StepPlan, now_s: float) -> None:
        try:
            results = self._runner.execute(plan)
        except RowError as failure:
            self._scheduler.fail(plan)
            self._fail(failure.key, failure.error)
            self._ask_again(plan)
            return
        endings: list[FinishReason | None] = [self._ending(result) for result in results]
        judged = [
            replace(result, is_last=ending is not None)
            for result, ending in zip(results, endings, strict=True)
        ]
        events = self._scheduler.commit(plan, judged)
        self._meter.measure(plan, self._clock() - now_s)
        for row, result, ending in zip(plan.rows, judged, endings, strict=True):
            self._tell(row, result, ending)
        self._end_outgrown(events)

    def _ending(self, result: RowResult) -> FinishReason | None:
        """Why the answer ends with this result's tokens, if it does."""
        live = self._live.get(result.request_id)
        if live is None or not result.sampled:
            return None
        if result.is_last:
            return "stop"
        next_position = live.position + len(result.sampled)
        return finish_reason(live.request.sampling, next_position, result.sampled)

    def _tell(self, row: RowPlan, result: RowResult, ending: FinishReason | None) -> None:
        """Turns one row's result into events."""
        live = self._live.get(row.request_id)
        if live is None:
            return
        if not row.is_decode:
            self._tell_progress(live, row)
        if not result.sampled:
            return
        key = row.request_id
        live.unsent.extend(result.sampled)
        live.position += len(result.sampled)
        if self._scheduler.config.role == "prefill":
            live.is_held = True
            hand_off = self._scheduler.hand_off(key, job=key)
            self._send_tokens(live, "prefilled", ending, hand_off)
        elif ending is not None:
            self._send_tokens(live, "tokens", ending)
            del self._live[key]
            self._let_go(key)
        elif len(live.unsent) >= self._runner.frame_tokens(key):
            self._send_tokens(live, "tokens", None)

    def _tell_progress(self, live: LiveRequest, row: RowPlan) -> None:
        """Names the units that this chunk completed, unless the hand-off is about to."""
        live.num_computed = row.start + row.length
        if row.wants_logits or self._scheduler.config.role != "prefill":
            return
        unit_tokens = self._scheduler.cache.config.unit_tokens
        num_whole = live.num_computed // unit_tokens
        first, live.num_told_units = live.num_told_units, num_whole
        if num_whole > first:
            self._events.append(
                EngineEvent(
                    kind="progress",
                    key=row.request_id,
                    position=first * unit_tokens,
                    units=tuple(row.units[first:num_whole]),
                )
            )

    def _send_tokens(
        self,
        live: LiveRequest,
        kind: EventKind,
        ending: FinishReason | None,
        hand_off: HandOff | None = None,
    ) -> None:
        self._events.append(
            EngineEvent(
                kind=kind,
                key=live.request.key,
                position=live.position - len(live.unsent),
                token_ids=tuple(live.unsent),
                finish_reason=ending,
                hand_off=hand_off,
            )
        )
        live.unsent.clear()

    def _announce_admissions(self) -> None:
        """Tells what the prefix cache gave each request that was just admitted."""
        still_waiting: list[str] = []
        for key in self._waiting:
            live = self._live.get(key)
            if live is None:
                continue
            usage = self._scheduler.usage(key)
            if usage is None:
                still_waiting.append(key)
                continue
            live.is_admitted = True
            live.num_computed = usage.cached_local + usage.cached_remote
            needed = tuple(
                index
                for index, image in enumerate(live.request.request.images)
                if image.offset + image.count > live.num_computed
            )
            self._events.append(
                EngineEvent(
                    "admitted", key, usage=usage, images=needed, at_ns=time.perf_counter_ns()
                )
            )
        self._waiting = still_waiting

    def _fail(self, key: str, error: K3Error) -> None:
        if self.abort(key):
            self._events.append(EngineEvent(kind="failed", key=key, error=error))

    def _end_outgrown(self, events: Iterable[Event]) -> None:
        """Ends what the scheduler had to end by itself: answers that outgrew the cache."""
        for event in events:
            if event.kind == "finished" and event.request_id in self._live:
                self._end_short(event.request_id)

    def _end_short(self, key: str) -> None:
        """Ends a request that the scheduler ended: there is no room for another token."""
        live = self._live.pop(key)
        self._send_tokens(live, "tokens", "length")
        self._let_go(key)

    def _let_go(self, key: str) -> None:
        """Forgets what else is known of a request that is over."""
        self._runner.forget(key)
        self._scheduler.forget_usage(key)
        self._on_hold.discard(key)

    def _ask_again(self, plan: StepPlan) -> None:
        """A step that did not run starts its rows over, perhaps from an earlier token."""
        for row in plan.rows:
            live = self._live.get(row.request_id)
            if live is None:
                continue
            indices = range(len(live.request.request.images))
            missing = tuple(index for index in indices if index not in live.provided_images)
            usage = self._scheduler.usage(row.request_id)
            if missing:
                self._events.append(
                    EngineEvent("admitted", row.request_id, usage=usage, images=missing)
                )
