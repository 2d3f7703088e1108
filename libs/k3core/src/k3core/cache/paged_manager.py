"""Units of MLA rows: pages handed out, the index of digests, references, leaf-first eviction.

The index is closed: a unit that is in it has its parent in it, because only leaves without a
reference are ever evicted. A unit belongs to one page for life; a page returns to the pool
when the last of its units is gone.
"""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from k3core.cache.page_pool import PagePool
from k3core.cache.spec import CacheConfig

_ROOT = -1
# Units of a path that are looked at as one when states are sought: a path of 200k tokens has 25.
STRETCH_UNITS = 64


class PagedManager:
    """Owns every unit of one arena.

    Per unit: `refs` (tables and pins that hold it), `digest` (None: not in the index),
    `parent`, `children`, `epoch` of the last use, `depth`, whether a state stood on it. Per page:
    places handed out, places in use, units with a reference. Per first unit of a stretch: units on
    which a state stood, on every path that goes on from there, up to the next stretch.
    """

    def __init__(self, config: CacheConfig, pool: PagePool) -> None:
        self._pool = pool
        self._page_units = config.page_units
        num_units = pool.num_pages * config.page_units
        self.index: dict[bytes, int] = {}
        self.refs = [0] * num_units
        self.digest: list[bytes | None] = [None] * num_units
        self.parent = [_ROOT] * num_units
        self.children = [0] * num_units
        self.epoch = [0] * num_units
        self.depth = [0] * num_units
        self.lost_state: set[bytes] = set()
        self.is_used = bytearray(num_units)
        self._had_state = bytearray(num_units)
        self._stretch = [0] * num_units
        self._num_with_state = [0] * num_units
        self._next_place = [0] * pool.num_pages
        self._used_places = [0] * pool.num_pages
        self._page_refs = [0] * pool.num_pages
        self._is_open = bytearray(pool.num_pages)
        self._leaves: list[tuple[int, int, int]] = []
        self.num_idle_pages = 0

    def match(self, digests: Sequence[bytes]) -> int:
        """Leading units that are in the index; O(log n) probes, because the index is closed."""
        index = self.index
        low, high = 0, len(digests)
        # Galloping first: most lookups either miss at once or match nearly everything.
        if not high or digests[0] not in index:
            return 0
        if digests[high - 1] in index:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            if digests[middle] in index:
                low = middle
            else:
                high = middle
        return high

    def reference(self, units: Iterable[int]) -> None:
        """Hold units: they are not evicted."""
        refs, page_refs, size = self.refs, self._page_refs, self._page_units
        for unit in units:
            if not refs[unit]:
                page = unit // size
                if not page_refs[page]:
                    self.num_idle_pages -= 1
                page_refs[page] += 1
            refs[unit] += 1

    def release(self, units: Sequence[int]) -> None:
        """Let go, deepest first: what is not in the index is freed, the rest may be evicted."""
        refs, page_refs, size = self.refs, self._page_refs, self._page_units
        digest, children = self.digest, self.children
        for unit in reversed(units):
            refs[unit] -= 1
            if refs[unit]:
                continue
            page = unit // size
            page_refs[page] -= 1
            if not page_refs[page]:
                self.num_idle_pages += 1
            if digest[unit] is None:
                self._free_unit(unit)
            elif not children[unit]:
                self._push_leaf(unit)

    def touch(self, units: Iterable[int], epoch: int) -> None:
        """Note a use. Only held units are touched, so no queue entry goes stale by it."""
        ages = self.epoch
        for unit in units:
            ages[unit] = epoch

    def pages_for(self, open_page: int, last_unit: int, count: int) -> int:
        """New pages that `count` more units take, given the page they may continue."""
        return -(-max(0, count - self._room(open_page, last_unit)) // self._page_units)

    def grow(self, units: list[int], open_page: int, count: int) -> int:
        """Append `count` fresh, held units; the pages must have been made room for.

        Returns:
            The page that is being filled now.
        """
        size, last = self._page_units, units[-1] if units else -1
        page = open_page
        if page < 0 and self._room(-1, last):
            page = last // size
        refs, used, page_refs = self.refs, self.is_used, self._page_refs
        while count:
            if page < 0 or self._next_place[page] == size:
                if page >= 0:
                    self._is_open[page] = 0
                page = self._pool.take_rows()
                assert page >= 0, "room is made before a table grows"
                self._next_place[page] = 0
            elif not page_refs[page]:
                self.num_idle_pages -= 1
            place = self._next_place[page]
            taken = min(count, size - place)
            first = page * size + place
            units.extend(range(first, first + taken))
            refs[first : first + taken] = [1] * taken
            used[first : first + taken] = b"\1" * taken
            page_refs[page] += taken
            self._next_place[page] = place + taken
            self._used_places[page] += taken
            self._is_open[page] = 1
            count -= taken
        return page

    def close_page(self, page: int) -> None:
        """The sequence that filled a page ended; another may continue it."""
        if page >= 0:
            self._is_open[page] = 0

    def is_open(self, page: int) -> bool:
        """Whether a sequence is still filling the page."""
        return page >= 0 and bool(self._is_open[page])

    def publish(
        self, units: list[int], digests: Sequence[bytes], start: int, stop: int, epoch: int
    ) -> int:
        """Put units start..stop - 1 of a table into the index.

        A unit whose digest is there already is dropped and the table pointed at the first.

        Returns:
            How many were dropped.
        """
        index, dropped, place = self.index, 0, start
        while place < stop and (known := index.get(digests[place])) is not None:
            unit = units[place]
            if known != unit:
                self.reference((known,))
                units[place] = known
                self.release((unit,))
                dropped += 1
            place += 1
        if place < stop:
            # The index is closed: what comes after a unit that is not in it is not in it either.
            self._publish_new(units, digests, place, stop, epoch)
        return dropped

    def _publish_new(
        self, units: list[int], digests: Sequence[bytes], start: int, stop: int, epoch: int
    ) -> None:
        digest, parents, children = self.digest, self.parent, self.children
        epochs, depths, stretches = self.epoch, self.depth, self._stretch
        parent, first = units[start - 1] if start else _ROOT, units[start]
        if parent >= 0:
            children[parent] += 1
            first = stretches[parent]
        fresh = units[start:stop]
        self.index.update(zip(digests[start:stop], fresh, strict=True))
        for place, unit in enumerate(fresh, start):
            if not place % STRETCH_UNITS:
                first = unit
            digest[unit] = digests[place]
            parents[unit] = parent
            children[unit] = 1
            epochs[unit] = epoch
            depths[unit] = place
            stretches[unit] = first
            parent = unit
        children[parent] = 0

    def note_state(self, unit: int) -> None:
        """A state stands on a unit of the index now; noted until the unit leaves the index."""
        if not self._had_state[unit]:
            self._had_state[unit] = 1
            self._num_with_state[self._stretch[unit]] += 1

    def stretches(self, digests: Sequence[bytes], low: int, high: int) -> Iterator[tuple[int, int]]:
        """Parts of units low..high - 1 of a path outside of which no state stands or stood.

        Deepest first: where the path runs through a stretch that has states, if only on other
        branches.
        """
        known, counts = self.index.get, self._num_with_state
        for start in reversed(range(low - low % STRETCH_UNITS, high, STRETCH_UNITS)):
            unit = known(digests[start])
            if unit is not None and counts[unit]:
                yield max(low, start), min(high, start + STRETCH_UNITS)

    def oldest_leaf(self) -> tuple[int, int] | None:
        """(epoch, unit) of the next victim, or None; changes nothing that can be observed."""
        while self._leaves:
            epoch, _, unit = self._leaves[0]
            if self._is_leaf(unit) and self.epoch[unit] == epoch:
                return epoch, unit
            heappop(self._leaves)
        return None

    def evict(self, unit: int) -> bytes:
        """Take a leaf without a reference out of the index and free it.

        Returns:
            Its digest, so that a checkpoint standing on it can go as well.
        """
        assert self._is_leaf(unit)
        name = self.digest[unit]
        assert name is not None
        del self.index[name]
        self.digest[unit] = None
        self.lost_state.discard(name)
        if self._had_state[unit]:
            self._had_state[unit] = 0
            self._num_with_state[self._stretch[unit]] -= 1
        parent = self.parent[unit]
        if parent >= 0:
            self.children[parent] -= 1
            if not self.children[parent] and not self.refs[parent]:
                self._push_leaf(parent)
        self._free_unit(unit)
        return name

    def subtree(self, unit: int) -> list[int]:
        """A unit and everything below it, deepest first. Walks the whole index."""
        below = {unit}
        by_depth = sorted(self.index.values(), key=lambda each: self.depth[each])
        for each in by_depth:
            if self.parent[each] in below:
                below.add(each)
        return sorted(below, key=lambda each: -self.depth[each])

    def num_referenced_pages(self) -> int:
        """Pages of which somebody holds a unit."""
        return sum(1 for held in self._page_refs if held)

    def is_idle(self, page: int) -> bool:
        """Whether a page holds units and nobody holds any of them."""
        return self._used_places[page] > 0 and not self._page_refs[page]

    def _room(self, open_page: int, last_unit: int) -> int:
        """Places left in the page that a table may continue."""
        size = self._page_units
        if open_page >= 0:
            return size - self._next_place[open_page]
        if last_unit < 0 or self._is_open[last_unit // size]:
            return 0
        page, place = divmod(last_unit, size)
        return size - place - 1 if self._next_place[page] == place + 1 else 0

    def _is_leaf(self, unit: int) -> bool:
        return self.digest[unit] is not None and not self.refs[unit] and not self.children[unit]

    def _push_leaf(self, unit: int) -> None:
        heappush(self._leaves, (self.epoch[unit], -self.depth[unit], unit))
        if len(self._leaves) > 64 + 4 * len(self.index):
            self._leaves = [
                (self.epoch[each], -self.depth[each], each)
                for each in self.index.values()
                if self._is_leaf(each)
            ]
            heapify(self._leaves)

    def _free_unit(self, unit: int) -> None:
        page = unit // self._page_units
        self.is_used[unit] = 0
        self._used_places[page] -= 1
        first = page * self._page_units
        while self._next_place[page] and not self.is_used[first + self._next_place[page] - 1]:
            self._next_place[page] -= 1
        if not self._used_places[page]:
            self._is_open[page] = 0
            self.num_idle_pages -= 1
            self._pool.put_rows(page)
