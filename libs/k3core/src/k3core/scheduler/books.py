"""Who waits, who runs, who ended: the scheduler's lists and how requests leave them."""

from collections import deque

from k3core.cache.coordinator import PrefixCache
from k3core.cache.positions import StateClass
from k3core.scheduler.entry import Entry, Status
from k3core.scheduler.pictures import Pictures
from k3core.scheduler.plan import Usage


class Books:
    """Every live request is in `entries`, and in at most one of the two lists.

    Attributes:
        entries: by request id.
        waiting: in the order they will be admitted.
        running: in the order they were admitted.
        ended_usage: counts of requests that ended, until somebody has read them.
    """

    def __init__(self, cache: PrefixCache, pictures: Pictures) -> None:
        self._cache = cache
        self._pictures = pictures
        self.entries: dict[str, Entry] = {}
        self.waiting: deque[Entry] = deque()
        self.running: list[Entry] = []
        self.ended_usage: dict[str, Usage] = {}

    def take_off(self, entry: Entry, may_donate: bool = True) -> None:
        """Back to the front of the queue; full units stay cached, the state if it can."""
        self.running.remove(entry)
        entry.status = Status.WAITING
        self._pictures.release(entry, len(entry.sequence.tokens))
        self._cache.finish(entry.sequence, StateClass.OPPORTUNISTIC if may_donate else None)
        self.waiting.appendleft(entry)

    def end(self, entry: Entry, donate: StateClass | None) -> None:
        """Forget a request; its pages go once no step and no transfer can touch them."""
        name = entry.request.request_id
        if entry.status is Status.RUNNING:
            self.running.remove(entry)
        elif entry.status is Status.WAITING:
            self.waiting.remove(entry)
        self._pictures.release(entry, len(entry.sequence.tokens))
        entry.status, entry.is_released = Status.ENDED, True
        if not entry.jobs:
            self.let_pages_go(entry, donate)
        del self.entries[name]
        if entry.usage is not None:
            self.ended_usage[name] = entry.usage

    def let_pages_go(self, entry: Entry, donate: StateClass | None) -> None:
        """Free an ended request's pages, its state donated if that was asked and planned."""
        sequence = entry.sequence
        if sequence.live:
            is_planned = sequence.num_computed in sequence.targets
            keep = donate if is_planned or self._cache.config.retention.unit_end else None
            self._cache.fence.after(lambda: self._cache.finish(sequence, keep))
