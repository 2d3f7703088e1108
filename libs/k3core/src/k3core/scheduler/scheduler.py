"""Which rows run next: continuous batching over one prefix cache.

Requests enter; plans leave; results come back. No clock, no I/O, no tensor: the same inputs
give the same plans. What must always hold: a page that a planned step may touch is not given
to anyone else before that step was committed, and nothing that a step writes is visible to
another request before that commit.
"""

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from k3core.cache.coordinator import Admission, PrefixCache
from k3core.cache.match import Match
from k3core.cache.positions import StateClass
from k3core.cache.sequence import Sequence as CachedSequence
from k3core.cache.spec import CacheError
from k3core.scheduler.embeddings import EmbeddingCache
from k3core.scheduler.entry import Entry, Status
from k3core.scheduler.hand_over import HandOver
from k3core.scheduler.plan import Event, HandOff, Reservation, RowResult, StepPlan, Usage
from k3core.scheduler.planner import DraftStep, StepPlanner
from k3core.scheduler.request import Request

Role: TypeAlias = Literal["combined", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step.

    Attributes:
        role: `prefill` holds pages after the first token; `decode` adopts; `combined` does both.
        chunk_tokens: token budget of a step, or several used in turn.
        max_rows: sequences in a step.
        encoder_tokens: capacity of the embedding buffer, in image tokens; 0 for no bound.
        waits_for_embeddings: a chunk stops before a picture until `set_embedding_ready`.
    """

    role: Role = "combined"
    chunk_tokens: tuple[int, ...] = (8192,)
    max_rows: int = 256
    encoder_tokens: int = 0
    waits_for_embeddings: bool = False


class Scheduler:
    """The queue, the batch and their cache. Not thread safe: one engine thread owns it."""

    def __init__(self, config: SchedulerConfig, cache: PrefixCache) -> None:
        if not config.chunk_tokens or min(config.chunk_tokens) < 1:
            raise CacheError(f"chunk_tokens must be at least 1, not {config.chunk_tokens}")
        self.config = config
        self.cache = cache
        self.embeddings = EmbeddingCache(config.encoder_tokens) if config.encoder_tokens else None
        self._planner = StepPlanner(
            cache, self.embeddings, config.waits_for_embeddings, config.role == "prefill"
        )
        self._hand_over = HandOver(cache, self._planner)
        self._entries: dict[str, Entry] = {}
        self._waiting: deque[Entry] = deque()
        self._running: list[Entry] = []
        self._ended_usage: dict[str, Usage] = {}
        self._late_events: list[Event] = []
        # Rows in flight by step and request: an id may be used again before its step is back.
        self._flying: dict[tuple[int, str], Entry] = {}
        self._num_steps = 0

    # --- requests ------------------------------------------------------------------------

    def add(self, request: Request, is_on_hold: bool = False) -> Event | None:
        """Queue a request. Returns a `refused` event if it could never fit, else None.

        Raises:
            CacheError: if a live request has its id, or a picture lies outside the prompt.
        """
        if request.request_id in self._entries:
            raise CacheError(f"request {request.request_id} is live already")
        reason = self._refusal(request)
        if reason:
            return Event("refused", request.request_id, reason=reason)
        self._ended_usage.pop(request.request_id, None)
        entry = Entry(request, self._sequence(request), is_on_hold=is_on_hold)
        self._entries[request.request_id] = entry
        self._waiting.append(entry)
        return None

    def let_go(self, request_id: str) -> bool:
        """Take a request off hold."""
        entry = self._entries.get(request_id)
        if entry is None or not entry.is_on_hold:
            return False
        entry.is_on_hold = False
        return True

    def abort(self, request_id: str) -> bool:
        """Forget a request in any state; pages return once no planned step can touch them.

        Pages that a transfer job reads return when the job is closed. A reservation's return at
        once: abort it only when the sender will write no more.

        Returns:
            False if it is not known (ended already, or never was): nothing changed.
        """
        entry = self._entries.get(request_id)
        if entry is None:
            return False
        if entry.status is Status.RESERVED:
            self._hand_over.cancel(entry)
        self._end(entry, None)
        return True

    def finish(self, request_id: str) -> bool:
        """End a request early but well: what it computed stays cached, its state too if it can.

        Returns:
            False if it is not known.
        """
        entry = self._entries.get(request_id)
        if entry is None:
            return False
        self._end(entry, StateClass.ENDPOINT)
        return True

    def sequence(self, request_id: str) -> CachedSequence | None:
        """The cache's view of a live request, to look at."""
        entry = self._entries.get(request_id)
        return entry.sequence if entry is not None else None

    def preempt(self, request_id: str) -> bool:
        """Take a running request off the batch; it waits at the front and resumes later.

        One whose row is in flight is taken off when that step is committed.
        """
        entry = self._entries.get(request_id)
        if entry is None or entry.status is not Status.RUNNING:
            return False
        if entry.in_flight:
            entry.is_preempt_asked = True
        else:
            self._take_off(entry)
        return True

    def set_embedding_ready(self, request_id: str, index: int) -> None:
        """The embeddings of the request's image `index` are in the worker's buffer."""
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.ready_images.add(index)

    def usage(self, request_id: str) -> Usage | None:
        """Counts of an admitted request, also after its end until `forget_usage`."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.usage is not None:
            return entry.usage
        return self._ended_usage.get(request_id)

    def forget_usage(self, request_id: str) -> None:
        """Drop the counts of an ended request."""
        self._ended_usage.pop(request_id, None)

    def has_work(self) -> bool:
        """Whether any request waits (on hold or not) or runs."""
        return bool(self._waiting or self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    # --- steps ---------------------------------------------------------------------------

    def schedule(self, held: Container[str] = ()) -> StepPlan:
        """Decide the next step; a plan without rows means there is nothing to run now.

        A plan without rows is not committed; its copies must still be executed.

        Args:
            held: running requests whose next token is not wanted yet; they keep their pages.
        """
        self.cache.epoch += 1
        sizes = self.config.chunk_tokens
        budget = sizes[self._num_steps % len(sizes)]
        step = DraftStep()
        budget -= self._plan_decodes(step, budget, held)
        budget -= self._plan_chunks(step, budget)
        self._admit(step, budget)
        if not step.rows:
            for admission in step.admissions:
                self.cache.end_restore(admission)
            return self._planner.build(0, step, self._take_late_events())
        self._num_steps += 1
        plan = self._planner.build(self.cache.fence.open_step(), step)
        for row in step.rows:
            row.entry.in_flight = plan.step
            self._flying[plan.step, row.entry.request.request_id] = row.entry
        for admission in step.admissions:
            self.cache.fence.after(lambda done=admission: self.cache.end_restore(done))
        return plan

    def commit(self, plan: StepPlan, results: Sequence[RowResult]) -> list[Event]:
        """Take what a step did: seal exports, append tokens, end requests, free pages.

        Plans are committed in the order they were made. Rows of requests aborted meanwhile
        are ignored.
        """
        events = list(self._take_late_events())
        by_id = {result.request_id: result for result in results}
        for row in plan.rows:
            entry = self._flying.pop((plan.step, row.request_id))
            result = by_id.get(row.request_id)
            if entry.status is not Status.RUNNING or result is None:
                self._cancel_exports(entry)
                entry.in_flight = 0
                continue
            self._commit_row(entry, row.start, row.length, row.is_decode, result, events)
        self.cache.fence.close_step(plan.step)
        return events

    def fail(self, plan: StepPlan) -> None:
        """Undo a step that did not run to its end: nothing is sealed, its rows start over.

        Live states may be half written, so every row is preempted and computed again from the
        deepest checkpoint.
        """
        for row in plan.rows:
            entry = self._flying.pop((plan.step, row.request_id))
            self._cancel_exports(entry)
            entry.in_flight = 0
            if entry.status is Status.RUNNING:
                self._take_off(entry, may_donate=False)
        self.cache.fence.close_step(plan.step)

    # --- roles ---------------------------------------------------------------------------

    def hand_off(self, request_id: str, job: str) -> HandOff:
        """Pin a prefilled request's pages for one transfer job.

        Raises:
            CacheError: if the request holds no finished prompt, or the job is open already.
        """
        return self._hand_over.hand_off(self._entries.get(request_id), request_id, job)

    def close_transfer(self, job: str) -> bool:
        """Let go of a job's pins; False if unknown (a duplicate acknowledgement)."""
        entry = self._hand_over.close(job)
        if entry is None:
            return False
        if entry.is_released and not entry.jobs:
            self._let_pages_go(entry, StateClass.ENDPOINT)
        return True

    def release(self, request_id: str) -> bool:
        """End a prefilled request: publish its state, free what no transfer job pins.

        Returns:
            False if it is not held (a duplicate): nothing changed.
        """
        entry = self._entries.get(request_id)
        if entry is None or entry.status is not Status.HELD:
            return False
        self._end(entry, StateClass.ENDPOINT)
        return True

    def reserve(self, request: Request) -> Reservation | None:
        """Make room on a decode worker for a prompt; None if it does not fit now.

        `abort(request_id)` gives the room back.

        Raises:
            CacheError: if a live request has its id or it could never fit.
        """
        if request.request_id in self._entries:
            raise CacheError(f"request {request.request_id} is live already")
        reason = self._refusal(request)
        if reason:
            raise CacheError(reason)
        entry = Entry(request, self._sequence(request))
        reservation = self._hand_over.reserve(entry)
        if reservation is not None:
            self._entries[request.request_id] = entry
        return reservation

    def adopt(self, request_id: str, first_token: int) -> list[Event]:
        """The reserved pages were filled: join the batch, continuing after `first_token`.

        The first token is not reported again; a request that wanted no more ends at once.

        Raises:
            CacheError: if nothing is reserved under this id.
        """
        entry = self._entries.get(request_id)
        if entry is None or entry.status is not Status.RESERVED:
            raise CacheError(f"no reservation for request {request_id}")
        self._hand_over.adopt(entry, first_token)
        if entry.num_generated >= entry.request.max_new_tokens:
            self._end(entry, None)
            return [Event("finished", request_id)]
        self._running.append(entry)
        return []

    def _take_late_events(self) -> tuple[Event, ...]:
        events, self._late_events = tuple(self._late_events), []
        return events

    # --- planning ------------------------------------------------------------------------

    def _plan_decodes(self, step: DraftStep, budget: int, held: Container[str]) -> int:
        used = 0
        for entry in list(self._running):
            if entry.status is not Status.RUNNING or entry.in_flight or entry.is_prefilling:
                continue
            if entry.request.request_id in held:
                continue
            drafts = min(entry.request.draft_tokens, self._num_wanted(entry) - 1)
            if len(step.rows) >= self.config.max_rows or used + 1 > budget:
                break
            drafts = max(0, min(drafts, budget - used - 1))
            if self._grow(step, entry, 1 + drafts):
                self._planner.add_decode(step, entry, drafts)
                used += 1 + drafts
        return used

    def _plan_chunks(self, step: DraftStep, budget: int) -> int:
        used = 0
        for entry in self._running:
            if entry.in_flight or not entry.is_prefilling:
                continue
            if len(step.rows) >= self.config.max_rows or used >= budget:
                break
            used += self._planner.add_chunk(step, entry, budget - used)
        return used

    def _admit(self, step: DraftStep, budget: int) -> None:
        used, later = 0, deque[Entry]()
        while self._waiting and used < budget and len(step.rows) < self.config.max_rows:
            entry = self._waiting.popleft()
            match = None if entry.is_on_hold else self.cache.lookup(entry.sequence)
            # Only what depends on this very step waits for it; the queue behind it goes on.
            if match is None or match.awaits:
                later.append(entry)
                continue
            is_alone = not self._running and not self._hand_over.has_open
            admission = self.cache.begin(entry.sequence, match, is_alone)
            if admission is None:
                later.append(entry)
                break
            self._enter(step, entry, admission)
            used += self._planner.add_chunk(step, entry, budget - used)
        later.extend(self._waiting)
        self._waiting = later

    def _enter(self, step: DraftStep, entry: Entry, admission: Admission) -> None:
        admission.is_resumed = entry.usage is not None
        self.cache.commit(admission)
        if entry.usage is None:
            entry.usage = _usage(admission.match)
        entry.status = Status.RUNNING
        self._running.append(entry)
        step.admissions.append(admission)

    def _grow(self, step: DraftStep, entry: Entry, count: int) -> bool:
        """Make units for `count` more tokens, preempting the youngest if there is no room."""
        sequence = entry.sequence
        planned = {id(row.entry) for row in step.rows}
        while not self.cache.grow(sequence, sequence.num_computed + count):
            victim = next(
                (
                    other
                    for other in reversed(self._running)
                    if not other.in_flight and id(other) not in planned
                ),
                entry,
            )
            if victim is entry and len(self._running) == 1:
                # Alone and still too long: nothing that could be freed is left.
                self._late_events.append(
                    Event("finished", entry.request.request_id, (), "capacity")
                )
                self._end(entry, None)
                return False
            self._take_off(victim)
            if victim is entry:
                return False
        return True

    def _num_wanted(self, entry: Entry) -> int:
        return entry.request.max_new_tokens - entry.num_generated

    # --- commit --------------------------------------------------------------------------

    def _commit_row(
        self,
        entry: Entry,
        start: int,
        length: int,
        is_decode: bool,
        result: RowResult,
        events: list[Event],
    ) -> None:
        sequence, cache = entry.sequence, self.cache
        sampled = result.sampled[: max(0, self._num_wanted(entry))]
        sequence.tokens.extend(sampled)
        if is_decode:
            # The input token and the accepted drafts stand; the last one is not computed yet.
            cache.advance(sequence, start + max(1, len(sampled)))
        else:
            cache.advance(sequence, start + length)
        self._seal_exports(entry, set(result.exported))
        cache.settle(sequence)
        self._release_images(entry, sequence.num_computed)
        entry.in_flight = 0
        if entry.is_prefilling and not is_decode:
            self._finish_asked(entry)
            return
        self._report(entry, sampled, result.is_last, events)

    def _report(
        self, entry: Entry, sampled: tuple[int, ...], is_last: bool, events: list[Event]
    ) -> None:
        name = entry.request.request_id
        if self.config.role == "prefill":
            entry.first_token = sampled[0] if sampled else -1
            entry.status = Status.HELD
            self._running.remove(entry)
            events.append(Event("prefilled", name, sampled))
            return
        if sampled:
            events.append(Event("token", name, sampled))
        if is_last or self._num_wanted(entry) <= 0:
            self._end(entry, StateClass.ENDPOINT)
            events.append(Event("finished", name))
            return
        self._finish_asked(entry)

    def _finish_asked(self, entry: Entry) -> None:
        if entry.is_preempt_asked:
            entry.is_preempt_asked = False
            self._take_off(entry)

    def _seal_exports(self, entry: Entry, written: set[int]) -> None:
        sequence, cache = entry.sequence, self.cache
        for export, packed in entry.exports:
            position = export.position
            if position not in written or position > sequence.num_computed:
                cache.cancel_export(export.pages)
                if packed:
                    cache.cancel_export(packed)
                continue
            reason = sequence.targets.get(position, StateClass.GRID)
            cache.seal(sequence, position, packed or export.pages, reason)
            if packed:
                cache.states.free(export.pages)
        entry.exports = []

    def _cancel_exports(self, entry: Entry) -> None:
        for export, packed in entry.exports:
            self.cache.cancel_export(export.pages)
            if packed:
                self.cache.cancel_export(packed)
        entry.exports = []

    # --- ends ----------------------------------------------------------------------------

    def _take_off(self, entry: Entry, may_donate: bool = True) -> None:
        """Back to the front of the queue; full units stay cached, the state if it can."""
        self._running.remove(entry)
        entry.status = Status.WAITING
        self._release_images(entry, len(entry.sequence.tokens))
        self.cache.finish(entry.sequence, StateClass.OPPORTUNISTIC if may_donate else None)
        self._waiting.appendleft(entry)

    def _end(self, entry: Entry, donate: StateClass | None) -> None:
        name = entry.request.request_id
        if entry.status is Status.RUNNING:
            self._running.remove(entry)
        elif entry.status is Status.WAITING:
            self._waiting.remove(entry)
        self._release_images(entry, len(entry.sequence.tokens))
        entry.status, entry.is_released = Status.ENDED, True
        if not entry.jobs:
            self._let_pages_go(entry, donate)
        del self._entries[name]
        if entry.usage is not None:
            self._ended_usage[name] = entry.usage

    def _let_pages_go(self, entry: Entry, donate: StateClass | None) -> None:
        sequence = entry.sequence
        if sequence.live:
            is_planned = sequence.num_computed in sequence.targets
            keep = donate if is_planned or self.cache.config.retention.unit_end else None
            self.cache.fence.after(lambda: self.cache.finish(sequence, keep))

    def _release_images(self, entry: Entry, computed: int) -> None:
        if self.embeddings is None:
            return
        for index in sorted(entry.acquired_images):
            image = entry.request.images[index]
            if image.offset + image.count <= computed:
                self.embeddings.release(image.key)
                entry.acquired_images.remove(index)

    def _sequence(self, request: Request) -> CachedSequence:
        return self.cache.new_sequence(
            request.request_id,
            request.tokens,
            ((image.offset, image.count, image.key) for image in request.images),
            request.salt,
            request.adapter,
            request.markers,
            request.unit_digests,
        )

    def _refusal(self, request: Request) -> str:
        n = len(request.tokens)
        if not n:
            return "the prompt is empty"
        if not self.cache.can_ever_fit(n):
            return f"the prompt of {n} tokens is larger than the cache"
        for image in request.images:
            if image.offset + image.count > n:
                return f"the picture at {image.offset} does not end inside the prompt"
            if self.embeddings is not None and image.count > self.embeddings.capacity:
                return f"the picture's {image.count} tokens are more than the buffer holds"
        return ""


def _usage(match: Match) -> Usage:
    return Usage(
        prompt_tokens=match.num_tokens,
        cached_local=match.hit,
        cached_remote=0,
        computed=match.num_tokens - match.hit,
        checkpoint=match.hit,
        matched=match.matched,
        reuse_gap=match.gap,
        gap_reason=match.reason,
    )
