"""Forms the batch of one step: who decodes, whose prompt goes on, who is let in, who must yield."""

from collections import deque
from collections.abc import Container

from k3core.cache.admission import Admission
from k3core.cache.coordinator import PrefixCache
from k3core.scheduler.books import Books
from k3core.scheduler.entry import Entry, Status
from k3core.scheduler.hand_over import HandOver
from k3core.scheduler.intake import usage_of
from k3core.scheduler.plan import Event
from k3core.scheduler.planner import DraftStep, StepPlanner


class BatchFormer:
    """Decode rows first, then chunks under way, then newcomers, within one budget of tokens."""

    def __init__(
        self,
        cache: PrefixCache,
        books: Books,
        planner: StepPlanner,
        hand_over: HandOver,
        max_rows: int,
    ) -> None:
        self._cache = cache
        self._books = books
        self._planner = planner
        self._hand_over = hand_over
        self._max_rows = max_rows
        self._late_events: list[Event] = []

    def plan_decodes(self, step: DraftStep, budget: int, held: Container[str]) -> int:
        """Rows of requests that generate; tokens taken of the budget."""
        used = 0
        for entry in list(self._books.running):
            if entry.status is not Status.RUNNING or entry.in_flight or entry.is_prefilling:
                continue
            if entry.request.request_id in held:
                continue
            drafts = min(entry.request.draft_tokens, entry.num_wanted - 1)
            if len(step.rows) >= self._max_rows or used + 1 > budget:
                break
            drafts = max(0, min(drafts, budget - used - 1))
            if self._grow(step, entry, 1 + drafts):
                self._planner.add_decode(step, entry, drafts)
                used += 1 + drafts
        return used

    def plan_chunks(self, step: DraftStep, budget: int) -> int:
        """Next chunks of prompts that are under way; tokens taken of the budget."""
        used = 0
        for entry in self._books.running:
            if entry.in_flight or not entry.is_prefilling:
                continue
            if len(step.rows) >= self._max_rows or used >= budget:
                break
            used += self._planner.add_chunk(step, entry, budget - used)
        return used

    def admit(self, step: DraftStep, budget: int) -> None:
        """Take waiting requests in, as far as budget, rows and memory go."""
        used, later = 0, deque[Entry]()
        while self._books.waiting and used < budget and len(step.rows) < self._max_rows:
            entry = self._books.waiting.popleft()
            match = None if entry.is_on_hold else self._cache.lookup(entry.sequence)
            # Only what depends on this very step waits for it; the queue behind it goes on.
            if match is None or match.awaits:
                later.append(entry)
                continue
            is_alone = not self._books.running and not self._hand_over.has_open
            admission = self._cache.begin(entry.sequence, match, is_alone)
            if admission is None:
                later.append(entry)
                break
            self._enter(step, entry, admission)
            used += self._planner.add_chunk(step, entry, budget - used)
        later.extend(self._books.waiting)
        self._books.waiting = later

    def _enter(self, step: DraftStep, entry: Entry, admission: Admission) -> None:
        admission.is_resumed = entry.usage is not None
        self._cache.commit(admission)
        if entry.usage is None:
            tier = self._cache.tier
            entry.usage = usage_of(admission.match, tier is not None and tier.is_remote)
        entry.status = Status.RUNNING
        self._books.running.append(entry)
        step.admissions.append(admission)

    def _grow(self, step: DraftStep, entry: Entry, count: int) -> bool:
        """Make units for `count` more tokens, preempting the youngest if there is no room."""
        sequence = entry.sequence
        planned = {id(row.entry) for row in step.rows}
        while not self._cache.grow(sequence, sequence.num_computed + count):
            victim = next(
                (
                    other
                    for other in reversed(self._books.running)
                    if not other.in_flight and id(other) not in planned
                ),
                entry,
            )
            if victim is entry and len(self._books.running) == 1:
                # Alone and still too long: nothing that could be freed is left.
                self._late_events.append(
                    Event("finished", entry.request.request_id, (), "capacity")
                )
                self._books.end(entry, None)
                return False
            self._books.take_off(victim)
            if victim is entry:
                return False
        return True

    def take_late_events(self) -> tuple[Event, ...]:
        """What became of requests while planning, once."""
        events, self._late_events = tuple(self._late_events), []
        return events
