"""Prefilled requests leaving, reserved ones arriving: pages that a transfer reads or writes."""

from k3core.cache.coordinator import PrefixCache
from k3core.cache.match import Match
from k3core.cache.spec import CacheError
from k3core.scheduler.entry import Entry, Status
from k3core.scheduler.plan import HandOff, Reservation, Usage


class HandOver:
    """Transfer jobs and the pages they keep in place."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._jobs: dict[str, tuple[Entry, frozenset[int]]] = {}

    @property
    def has_open(self) -> bool:
        """Whether any transfer is open."""
        return bool(self._jobs)

    def hand_off(self, entry: Entry | None, request_id: str, job: str) -> HandOff:
        """See `Scheduler.hand_off`."""
        if entry is None or not entry.sequence.live or entry.status is Status.RESERVED:
            raise CacheError(f"request {request_id} holds no finished prompt")
        if entry.is_prefilling:
            raise CacheError(f"the prompt of request {request_id} is not finished")
        sequence = entry.sequence
        self.open(entry, job)
        return HandOff(
            job=job,
            request_id=request_id,
            num_tokens=sequence.num_computed,
            units=tuple(self._cache.placed_units(sequence, len(sequence.units))),
            state_pages=tuple(map(self._cache.pool.place, sequence.live)),
            first_token=entry.first_token,
        )

    def open(self, entry: Entry, job: str) -> None:
        """Pin an entry's pages where they are.

        Raises:
            CacheError: if the job is open already.
        """
        if job in self._jobs:
            raise CacheError(f"transfer {job} is open already")
        size = self._cache.config.page_units
        pages = frozenset(unit // size for unit in entry.sequence.units)
        pages |= frozenset(entry.sequence.live)
        self._cache.pin_pages(pages)
        entry.jobs.add(job)
        self._jobs[job] = (entry, pages)

    def close(self, job: str) -> Entry | None:
        """End a job; returns whose it was, None if unknown."""
        found = self._jobs.pop(job, None)
        if found is None:
            return None
        entry, pages = found
        entry.jobs.discard(job)
        still = frozenset[int]().union(*(other for _, other in self._jobs.values()))
        self._cache.unpin_pages(pages - still)
        return entry

    def reserve(self, entry: Entry) -> Reservation | None:
        """See `Scheduler.reserve`."""
        cache, sequence = self._cache, entry.sequence
        n = len(sequence.tokens)
        resident = cache.resident_tokens(sequence)
        match = Match(n, resident, resident, None, 0, 0, "")
        admission = cache.begin(sequence, match)
        if admission is None:
            return None
        cache.commit(admission)
        entry.usage = Usage(n, resident, n - resident, 0, 0, resident, 0, "")
        entry.status = Status.RESERVED
        self.open(entry, _arrival(entry))
        return Reservation(
            request_id=entry.request.request_id,
            num_tokens=n,
            num_resident=resident,
            units=tuple(self._cache.placed_units(sequence, len(sequence.units))),
            state_pages=tuple(map(cache.pool.place, sequence.live)),
        )

    def cancel(self, entry: Entry) -> None:
        """Nothing will be written into a reservation any more."""
        self.close(_arrival(entry))

    def adopt(self, entry: Entry, first_token: int) -> None:
        """The pages were filled: publish them and go on after `first_token`."""
        self.close(_arrival(entry))
        sequence = entry.sequence
        self._cache.advance(sequence, len(sequence.tokens))
        self._cache.settle(sequence)
        sequence.tokens.append(first_token)
        entry.first_token = first_token
        entry.status = Status.RUNNING


def _arrival(entry: Entry) -> str:
    return f"arrival of {entry.request.request_id}"
