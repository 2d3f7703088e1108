"""Makes room: which rows and which states go when something else needs their pages."""

from k3core.cache.block_pool import PagePool
from k3core.cache.paged_manager import PagedManager
from k3core.cache.spec import CacheConfig
from k3core.cache.state_manager import Checkpoint, StateManager
from k3core.cache.stats import CacheStats, count


class Evictor:
    """Evicts from both kinds in one order of age where they share pages, apart where not."""

    def __init__(
        self,
        config: CacheConfig,
        pool: PagePool,
        paged: PagedManager,
        states: StateManager,
        stats: CacheStats,
    ) -> None:
        self._is_split = config.memory == "two_pools"
        self._pool = pool
        self._paged = paged
        self._states = states
        self._stats = stats

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

    def evict_state(self, checkpoint: Checkpoint) -> None:
        """Drop one checkpoint, whatever its age."""
        self._paged.lost_state.add(checkpoint.unit)
        self._states.evict(checkpoint)
        count(self._stats.evicted_states, checkpoint.reason.name.lower())

    def evict_unit(self, unit: int) -> None:
        """Drop one leaf, and with it the checkpoint that stands on it."""
        name = self._paged.digest[unit]
        checkpoint = self._states.sealed.get(name) if name is not None else None
        if checkpoint is not None:
            self.evict_state(checkpoint)
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
