"""Makes room: which rows and which states go when something else needs their pages."""

from k3core.cache.host_tier import HostTier
from k3core.cache.page_pool import PagePool
from k3core.cache.paged_manager import PagedManager
from k3core.cache.spec import CacheConfig
from k3core.cache.state_manager import Checkpoint, StateManager
from k3core.cache.stats import CacheStats, count


class Evictor:
    """Evicts from both kinds in one order of age where they share pages, apart where not.

    Attributes:
        is_spilling: whether what is evicted now may go to host memory: only while a step is
            planned, whose copies run before anything is written.
    """

    def __init__(
        self,
        config: CacheConfig,
        pool: PagePool,
        paged: PagedManager,
        states: StateManager,
        stats: CacheStats,
        tier: HostTier | None = None,
    ) -> None:
        self._unit_tokens = config.unit_tokens
        self._is_split = config.memory == "two_pools"
        self._pool = pool
        self._paged = paged
        self._states = states
        self._stats = stats
        self._tier = tier
        self._pool_place = pool.place
        self._page_units = config.page_units
        self.is_spilling = False

    def is_feasible(self, rows: int, state_pages: int) -> bool:
        """Whether so many pages can be had by evicting; changes nothing."""
        idle_rows, idle_states = self._paged.num_idle_pages, self._states.num_idle_pages
        if self._is_split:
            return (
                rows <= self._pool.free_rows() + idle_rows
                and state_pages <= self._pool.free_state_pages() + idle_states
            )
        return rows + state_pages <= self._pool.free_rows() + idle_rows + idle_states

    def make_room(self, rows: int, state_pages: int) -> bool:
        """Evict until so many pages of each kind are free."""
        if not self.is_feasible(rows, state_pages):
            return False
        while not self._pool.fits(rows, state_pages):
            if not self._evict_one(rows, state_pages):
                return False
        return True

    def evict_state(self, checkpoint: Checkpoint, is_surplus: bool = False) -> None:
        """Drop one checkpoint, whatever its age; to host memory unless it is surplus."""
        if self._tier is not None and self.is_spilling and not is_surplus:
            pages = tuple(map(self._pool_place, checkpoint.pages))
            self._tier.offer_state(checkpoint.digest, checkpoint.position, pages)
        self._paged.lost_state.add(checkpoint.digest)
        self._states.evict(checkpoint)
        count(self._stats.evicted_states, checkpoint.reason.name.lower())

    def evict_unit(self, unit: int) -> None:
        """Drop one leaf, and with it the checkpoint that stands on it."""
        name = self._paged.digest[unit]
        checkpoint = self._states.sealed.get(name) if name is not None else None
        if checkpoint is not None:
            self.evict_state(checkpoint)
        if self._tier is not None and self.is_spilling and name is not None:
            page, place = divmod(unit, self._page_units)
            where = self._pool_place(page) * self._page_units + place
            position = (self._paged.depth[unit] + 1) * self._unit_tokens
            self._tier.offer_unit(name, position, where)
        self._paged.evict(unit)
        self._stats.evicted_units += 1

    def evict_oldest_state(self) -> bool:
        """Drop the checkpoint that goes first; False if none may go."""
        checkpoint = self._states.victim()
        if checkpoint is None:
            return False
        self.evict_state(checkpoint)
        return True

    def evict_oldest_leaf(self) -> bool:
        """Drop the unit that goes first; False if none may go."""
        leaf = self._next_leaf()
        if leaf is None:
            return False
        self.evict_unit(leaf[1])
        return True

    def _evict_one(self, rows: int, state_pages: int) -> bool:
        lacks_rows = not self._pool.fits(rows, 0)
        if self._is_split:
            return self.evict_oldest_leaf() if lacks_rows else self.evict_oldest_state()
        checkpoint, leaf = self._states.victim(), self._next_leaf()
        if checkpoint is None and leaf is None:
            return False
        if leaf is None or checkpoint is None:
            is_state_next = checkpoint is not None
        elif state_pages and not rows:
            # A state in need takes from states first; rows go when no state is left to take.
            is_state_next = True
        else:
            is_state_next = checkpoint.epoch < leaf[0]
        if is_state_next:
            return self.evict_oldest_state()
        if state_pages and not lacks_rows:
            self._stats.rows_evicted_for_states += 1
        return self.evict_oldest_leaf()

    def _next_leaf(self) -> tuple[int, int] | None:
        """The next unit whose checkpoint, if it has one, is not being read."""
        leaf = self._paged.oldest_leaf()
        if leaf is None:
            return None
        name = self._paged.digest[leaf[1]]
        checkpoint = self._states.sealed.get(name) if name is not None else None
        # A pinned checkpoint belongs to a reader that holds the units as well.
        assert checkpoint is None or not checkpoint.pins
        return leaf
