"""Checkpoints of KDA states: slots, their life, and which of them goes first.

A slot is the pages of one whole state. FREE is the pool's; a slot that was taken is RESERVED,
WRITING while a step that writes it runs, SEALED once that step was committed and its digest is
known, RETIRING until no step can read it. Only sealed ones are found. Live states of running
requests are slots too, never sealed while they are live.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush

from k3core.cache.page_pool import PagePool
from k3core.cache.positions import EVICTION_RANK, StateClass
from k3core.cache.spec import CacheConfig, CacheError, Codec


class SlotState(Enum):
    """Where a slot is in its life."""

    FREE = "free"
    RESERVED = "reserved"
    WRITING = "writing"
    SEALED = "sealed"
    RETIRING = "retiring"


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A sealed state: immutable bytes, mutable standing.

    Attributes:
        digest: of the prefix it was taken after.
        position: tokens of that prefix.
        pages: its slot.
        codec: how the bytes are stored.
        reason: class for eviction; the strongest reason seen.
        unit: the unit that ends at `position`.
        epoch: of the last use.
        previous: position of the checkpoint before it on its path when it was sealed.
        number: ascending, breaks ties.
        successors: digests of the units that followed it in the sequences whose rules named
            it; kept under a strict drop only.
        hits: restores so far.
        pins: restores and transfers that read it now.
    """

    digest: bytes
    position: int
    pages: tuple[int, ...]
    codec: Codec
    reason: StateClass
    unit: int
    epoch: int
    previous: int
    number: int
    successors: set[bytes] = field(default_factory=set[bytes])
    hits: int = 0
    pins: int = 0


class StateManager:
    """Owns every state slot of one arena."""

    def __init__(self, config: CacheConfig, pool: PagePool) -> None:
        self._config = config
        self._pool = pool
        self._queue: list[tuple[int, int, int, int, int, bytes]] = []
        self._numbers = 0
        self._num_reused = 0
        self.sealed: dict[bytes, Checkpoint] = {}
        self.slots: dict[int, SlotState] = {}
        self._pages_of: dict[int, tuple[int, ...]] = {}
        self.num_idle_pages = 0
        self.max_sealed = 0

    @property
    def groups(self) -> int:
        """Pages of a raw state."""
        return self._config.state_groups

    @property
    def sealed_groups(self) -> int:
        """Pages of a sealed state under the configured codec."""
        return self._config.int8_groups if self._config.codec == "int8" else self.groups

    def reserve(self, count: int) -> tuple[int, ...] | None:
        """Take a slot of `count` pages; None if the pool has none free."""
        pages = self._pool.take_state(count)
        if pages is not None:
            self.slots[pages[0]] = SlotState.RESERVED
            self._pages_of[pages[0]] = pages
        return pages

    def start_writing(self, pages: tuple[int, ...]) -> None:
        """A step that writes the slot was planned."""
        self._expect(pages, SlotState.RESERVED, SlotState.WRITING)
        self.slots[pages[0]] = SlotState.WRITING

    def retire(self, pages: tuple[int, ...]) -> None:
        """The slot is given up; it is freed by `free` once nothing can touch it."""
        self._expect(pages, SlotState.RESERVED, SlotState.WRITING)
        self.slots[pages[0]] = SlotState.RETIRING

    def free(self, pages: tuple[int, ...]) -> None:
        """Return a slot that is not sealed to the pool.

        Raises:
            CacheError: if it is free already, or sealed.
        """
        self._expect(pages, SlotState.RESERVED, SlotState.WRITING, SlotState.RETIRING)
        del self.slots[pages[0]], self._pages_of[pages[0]]
        self._pool.put_state(pages)

    def seal(self, checkpoint: Checkpoint) -> bool:
        """Make a written slot visible under its digest.

        Returns:
            False if the digest has one already: the newcomer's slot is freed, the old bytes
            stay, and its class is raised to the stronger of the two.
        """
        known = self.sealed.get(checkpoint.digest)
        if known is not None:
            self.free(checkpoint.pages)
            if known.reason < checkpoint.reason:
                known.reason = checkpoint.reason
                self._push(known)
            return False
        self._expect(checkpoint.pages, SlotState.RESERVED, SlotState.WRITING)
        self.slots[checkpoint.pages[0]] = SlotState.SEALED
        self._numbers += 1
        checkpoint.number = self._numbers
        self.sealed[checkpoint.digest] = checkpoint
        self.max_sealed = max(self.max_sealed, len(self.sealed))
        self.num_idle_pages += len(checkpoint.pages)
        self._push(checkpoint)
        return True

    def pin(self, checkpoint: Checkpoint) -> None:
        """Hold a sealed state for a reader."""
        if not checkpoint.pins:
            self.num_idle_pages -= len(checkpoint.pages)
        checkpoint.pins += 1

    def unpin(self, checkpoint: Checkpoint) -> None:
        """Undo one `pin`.

        Raises:
            CacheError: if it is not pinned.
        """
        if not checkpoint.pins:
            raise CacheError(f"the checkpoint at {checkpoint.position} is not pinned")
        checkpoint.pins -= 1
        if not checkpoint.pins:
            self.num_idle_pages += len(checkpoint.pages)
            self._push(checkpoint)

    def use(self, checkpoint: Checkpoint, epoch: int) -> None:
        """Note a hit: only this checkpoint gets younger, not its ancestors."""
        self._num_reused += not checkpoint.hits
        checkpoint.hits += 1
        checkpoint.epoch = epoch
        self._push(checkpoint)

    def evict(self, checkpoint: Checkpoint) -> None:
        """Forget a sealed state and free its slot.

        Raises:
            CacheError: if it is pinned.
        """
        self.take_over(checkpoint)
        self.free(checkpoint.pages)

    def take_over(self, checkpoint: Checkpoint) -> tuple[int, ...]:
        """Forget a sealed state but keep its slot, which becomes the caller's.

        Raises:
            CacheError: if it is pinned or not sealed here.
        """
        if checkpoint.pins or self.sealed.get(checkpoint.digest) is not checkpoint:
            raise CacheError(f"the checkpoint at {checkpoint.position} is pinned or gone")
        del self.sealed[checkpoint.digest]
        self.num_idle_pages -= len(checkpoint.pages)
        self.slots[checkpoint.pages[0]] = SlotState.RESERVED
        return checkpoint.pages

    def victim(self) -> Checkpoint | None:
        """The sealed, unpinned state that goes first."""
        if self._config.eviction == "marconi":
            return self._least_useful()
        while self._queue:
            entry = self._queue[0]
            checkpoint = self.sealed.get(entry[-1])
            if checkpoint is not None and not checkpoint.pins and self._order(checkpoint) == entry:
                return checkpoint
            heappop(self._queue)
        return None

    def idle(self) -> Iterator[Checkpoint]:
        """Sealed states that nobody reads, in the order they were sealed."""
        return (each for each in self.sealed.values() if not each.pins)

    def slots_in_flight(self) -> list[tuple[int, ...]]:
        """Pages of slots that are taken and not sealed, live states included."""
        return [
            self._pages_of[first]
            for first, state in self.slots.items()
            if state is not SlotState.SEALED
        ]

    def by_class(self) -> dict[str, int]:
        """Sealed states of each class."""
        counts = {each.name.lower(): 0 for each in StateClass}
        for checkpoint in self.sealed.values():
            counts[checkpoint.reason.name.lower()] += 1
        return counts

    def _order(self, checkpoint: Checkpoint) -> tuple[int, int, int, int, int, bytes]:
        """Opportunistic states that never were hit go first; then age, class, depth."""
        is_spare = checkpoint.reason == StateClass.OPPORTUNISTIC and not checkpoint.hits
        return (
            0 if is_spare else 1,
            checkpoint.epoch,
            EVICTION_RANK[checkpoint.reason],
            checkpoint.position,
            checkpoint.number,
            checkpoint.digest,
        )

    def _push(self, checkpoint: Checkpoint) -> None:
        if self._config.eviction == "marconi":
            return
        heappush(self._queue, self._order(checkpoint))
        if len(self._queue) > 64 + 4 * len(self.sealed):
            self._queue = [self._order(each) for each in self.idle()]
            heapify(self._queue)

    def _least_useful(self) -> Checkpoint | None:
        """Lowest utility: recency plus work saved a byte, both scaled to 0..1, by likely reuse.

        Source: Marconi (MLSys 2025), section 4.3: recency + alpha * FLOPs / bytes. Every
        checkpoint frees the same bytes here, and recomputing from the checkpoint before it
        costs work in proportion to the tokens between, so the second term is that distance. It
        counts as often as the checkpoint was wanted, and as much more as checkpoints are wanted
        here at all: among prompts that never come again a new one is worth its recency alone.
        """
        idle = list(self.idle())
        if not idle:
            return None
        oldest = min(each.epoch for each in idle)
        span = max(1, max(each.epoch for each in idle) - oldest)
        longest = max(1, max(each.position - each.previous for each in idle))
        alpha = 1.0
        likely = (1 + self._num_reused) / (1 + self._numbers)

        def utility(each: Checkpoint) -> tuple[float, int]:
            recency = (each.epoch - oldest) / span
            saved = (each.position - each.previous) / longest
            # A junction is there because two prompts have wanted it already.
            wanted = each.hits + (2 if each.reason == StateClass.JUNCTION else 0)
            return recency + alpha * saved * (likely + wanted), each.number

        return min(idle, key=utility)

    def _expect(self, pages: tuple[int, ...], *states: SlotState) -> None:
        found = self.slots.get(pages[0], SlotState.FREE)
        if found not in states:
            raise CacheError(f"slot {pages[0]} is {found.value}")
