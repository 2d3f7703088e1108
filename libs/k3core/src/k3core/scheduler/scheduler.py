"""Which rows run next: continuous batching over one prefix cache.

Requests enter; plans leave; results come back. No clock, no I/O, no tensor: the same inputs
give the same plans. What must always hold: a page that a planned step may touch is not given
to anyone else before that step was committed, and nothing that a step writes is visible to
another request before that commit.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from k3core.cache.admission import Admission
from k3core.cache.coordinator import PrefixCache
from k3core.cache.positions import StateClass
from k3core.cache.sequence import Sequence as CachedSequence
from k3core.cache.spec import CacheError
from k3core.scheduler.books import Books
from k3core.scheduler.embeddings import EmbeddingCache
from k3core.scheduler.entry import Entry, Status
from k3core.scheduler.exports import cancel_exports, seal_exports
from k3core.scheduler.former import BatchFormer
from k3core.scheduler.hand_over import HandOver
from k3core.scheduler.intake import name_request, refusal
from k3core.scheduler.pictures import Pictures
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
        self._pictures = Pictures(self.embeddings, config.waits_for_embeddings)
        self._planner = StepPlanner(cache, self._pictures, config.role == "prefill")
        self._hand_over = HandOver(cache)
        self._books = Books(cache, self._pictures)
        self._former = BatchFormer(
            cache, self._books, self._planner, self._hand_over, config.max_rows
        )
        # Rows in flight by step and request: an id may be used again before its step is back.
        self._flying: dict[tuple[int, str], Entry] = {}
        self._admissions: dict[int, list[Admission]] = {}
        self._num_steps = 0

    # --- requests ------------------------------------------------------------------------

    def add(self, request: Request, is_on_hold: bool = False) -> Event | None:
        """Queue a request. Returns a `refused` event if it could never fit, else None.

        Raises:
            CacheError: if a live request has its id, or a picture lies outside the prompt.
        """
        if request.request_id in self._books.entries:
            raise CacheError(f"request {request.request_id} is live already")
        reason = refusal(self.cache, self.embeddings, request)
        if reason:
            return Event("refused", request.request_id, reason=reason)
        self._books.ended_usage.pop(request.request_id, None)
        entry = Entry(request, name_request(self.cache, request), is_on_hold=is_on_hold)
        self._books.entries[request.request_id] = entry
        self._books.waiting.append(entry)
        return None

    def let_go(self, request_id: str) -> bool:
        """Take a request off hold."""
        entry = self._books.entries.get(request_id)
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
        entry = self._books.entries.get(request_id)
        if entry is None:
            return False
        if entry.status is Status.RESERVED:
            self._hand_over.cancel(entry)
        self._books.end(entry, None)
        return True

    def finish(self, request_id: str) -> bool:
        """End a request early but well: what it computed stays cached, its state too if it can.

        Returns:
            False if it is not known.
        """
        entry = self._books.entries.get(request_id)
        if entry is None:
            return False
        self._books.end(entry, StateClass.ENDPOINT)
        return True

    def sequence(self, request_id: str) -> CachedSequence | None:
        """The cache's view of a live request, to look at."""
        entry = self._books.entries.get(request_id)
        return entry.sequence if entry is not None else None

    def preempt(self, request_id: str) -> bool:
        """Take a running request off the batch; it waits at the front and resumes later.

        One whose row is in flight is taken off when that step is committed.
        """
        entry = self._books.entries.get(request_id)
        if entry is None or entry.status is not Status.RUNNING:
            return False
        if entry.in_flight:
            entry.is_preempt_asked = True
        else:
            self._books.take_off(entry)
        return True

    def set_embedding_ready(self, request_id: str, index: int) -> None:
        """The embeddings of the request's image `index` are in the worker's buffer."""
        entry = self._books.entries.get(request_id)
        if entry is not None:
            entry.ready_images.add(index)

    def usage(self, request_id: str) -> Usage | None:
        """Counts of an admitted request, also after its end until `forget_usage`."""
        entry = self._books.entries.get(request_id)
        if entry is not None and entry.usage is not None:
            return entry.usage
        return self._books.ended_usage.get(request_id)

    def forget_usage(self, request_id: str) -> None:
        """Drop the counts of an ended request."""
        self._books.ended_usage.pop(request_id, None)

    def has_work(self) -> bool:
        """Whether any request waits (on hold or not) or runs."""
        return bool(self._books.waiting or self._books.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._books.waiting)

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self._books.running)

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
        self.cache.evictor.is_spilling = True
        budget -= self._former.plan_decodes(step, budget, held)
        budget -= self._former.plan_chunks(step, budget)
        self._former.admit(step, budget)
        self.cache.evictor.is_spilling = False
        if not step.rows:
            for admission in step.admissions:
                self.cache.end_restore(admission)
            return self._planner.build(0, step, self._former.take_late_events())
        self._num_steps += 1
        plan = self._planner.build(self.cache.fence.open_step(), step)
        for row in step.rows:
            row.entry.in_flight = plan.step
            self._flying[plan.step, row.entry.request.request_id] = row.entry
        self._admissions[plan.step] = step.admissions
        for admission in step.admissions:
            self.cache.fence.after(lambda done=admission: self.cache.end_restore(done))
        return plan

    def commit(self, plan: StepPlan, results: Sequence[RowResult]) -> list[Event]:
        """Take what a step did: seal exports, append tokens, end requests, free pages.

        Plans are committed in the order they were made. Rows of requests aborted meanwhile
        are ignored.
        """
        events = list(self._former.take_late_events())
        by_id = {result.request_id: result for result in results}
        for row in plan.rows:
            entry = self._flying.pop((plan.step, row.request_id))
            result = by_id.get(row.request_id)
            if entry.status is not Status.RUNNING or result is None:
                cancel_exports(self.cache, entry)
                entry.in_flight = 0
                continue
            self._commit_row(entry, row.start, row.length, row.is_decode, result, events)
        del self._admissions[plan.step]
        self.cache.fence.close_step(plan.step)
        return events

    def fail(self, plan: StepPlan, unreadable: Container[int] = ()) -> None:
        """Undo a step that did not run to its end: nothing is sealed, its rows start over.

        Live states may be half written, so every row is preempted and computed again from the
        deepest checkpoint.

        Args:
            plan: the oldest in flight.
            unreadable: bytes of host memory (`HostCopy.host`) of which its copies could not be
                made: they are not offered again, nor what lies behind them, and the requests
                that wanted them are counted by what they find next.
        """
        for admission in self._admissions.pop(plan.step):
            lost = admission.unreadable(unreadable)
            if lost and self.cache.tier is not None:
                self.cache.tier.lose(lost)
                self._count_anew(admission)
        for row in plan.rows:
            entry = self._flying.pop((plan.step, row.request_id))
            cancel_exports(self.cache, entry)
            entry.in_flight = 0
            if entry.status is Status.RUNNING:
                self._books.take_off(entry, may_donate=False)
        self.cache.fence.close_step(plan.step)

    def _count_anew(self, admission: Admission) -> None:
        """Undo the counts of an admission that came to nothing, unless its request is gone."""
        entry = self._books.entries.get(admission.sequence.key)
        if entry is None or entry.sequence is not admission.sequence:
            return
        self.cache.uncount(admission)
        if not admission.is_resumed:
            entry.usage = None

    # --- roles ---------------------------------------------------------------------------

    def hand_off(self, request_id: str, job: str) -> HandOff:
        """Pin a prefilled request's pages for one transfer job.

        Raises:
            CacheError: if the request holds no finished prompt, or the job is open already.
        """
        return self._hand_over.hand_off(self._books.entries.get(request_id), request_id, job)

    def close_transfer(self, job: str) -> bool:
        """Let go of a job's pins; False if unknown (a duplicate acknowledgement)."""
        entry = self._hand_over.close(job)
        if entry is None:
            return False
        if entry.is_released and not entry.jobs:
            self._books.let_pages_go(entry, StateClass.ENDPOINT)
        return True

    def release(self, request_id: str) -> bool:
        """End a prefilled request: publish its state, free what no transfer job pins.

        Returns:
            False if it is not held (a duplicate): nothing changed.
        """
        entry = self._books.entries.get(request_id)
        if entry is None or entry.status is not Status.HELD:
            return False
        self._books.end(entry, StateClass.ENDPOINT)
        return True

    def reserve(self, request: Request) -> Reservation | None:
        """Make room on a decode worker for a prompt; None if it does not fit now.

        `abort(request_id)` gives the room back.

        Raises:
            CacheError: if a live request has its id or it could never fit.
        """
        if request.request_id in self._books.entries:
            raise CacheError(f"request {request.request_id} is live already")
        reason = refusal(self.cache, self.embeddings, request)
        if reason:
            raise CacheError(reason)
        entry = Entry(request, name_request(self.cache, request))
        reservation = self._hand_over.reserve(entry)
        if reservation is not None:
            self._books.entries[request.request_id] = entry
        return reservation

    def adopt(self, request_id: str, first_token: int) -> list[Event]:
        """The reserved pages were filled: join the batch, continuing after `first_token`.

        The first token is not reported again; a request that wanted no more ends at once.

        Raises:
            CacheError: if nothing is reserved under this id.
        """
        entry = self._books.entries.get(request_id)
        if entry is None or entry.status is not Status.RESERVED:
            raise CacheError(f"no reservation for request {request_id}")
        self._hand_over.adopt(entry, first_token)
        if entry.num_generated >= entry.request.max_new_tokens:
            self._books.end(entry, None)
            return [Event("finished", request_id)]
        self._books.running.append(entry)
        return []

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
        sampled = result.sampled[: max(0, entry.num_wanted)]
        sequence.tokens.extend(sampled)
        if is_decode:
            # The input token and the accepted drafts stand; the last one is not computed yet.
            cache.advance(sequence, start + max(1, len(sampled)))
        else:
            cache.advance(sequence, start + length)
        seal_exports(self.cache, entry, set(result.exported))
        cache.settle(sequence)
        self._pictures.release(entry, sequence.num_computed)
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
            self._books.running.remove(entry)
            events.append(Event("prefilled", name, sampled))
            return
        if sampled:
            events.append(Event("token", name, sampled))
        if is_last or entry.num_wanted <= 0:
            self._books.end(entry, StateClass.ENDPOINT)
            events.append(Event("finished", name))
            return
        self._finish_asked(entry)

    def _finish_asked(self, entry: Entry) -> None:
        if entry.is_preempt_asked:
            entry.is_preempt_asked = False
            self._books.take_off(entry)
