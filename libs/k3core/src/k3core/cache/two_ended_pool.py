"""The unified arena: rows from one end, states from the other, holes kept or filled at once."""

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

from k3core.cache.page_pool import PageMap, PageMove


class TwoEndedPool:
    """One arena filled from both ends: rows from the bottom, states from the top.

    The free middle belongs to whoever needs it first. A hole inside an end is filled at once
    by that end's outermost page (eager), or kept for the next page of its kind and packed
    only when the middle runs out (lazy).
    """

    def __init__(self, num_pages: int, is_eager: bool, is_movable: Callable[[int], bool]) -> None:
        self.num_pages = num_pages
        self._is_eager = is_eager
        self._is_movable = is_movable
        self._map = PageMap(num_pages)
        # rows lie in places 0.._low - 1, states in _high..num_pages - 1.
        self._low, self._high = 0, num_pages
        self._row_holes: list[int] = []
        self._state_holes: list[int] = []
        self._moves: list[PageMove] = []

    def take_rows(self) -> int:
        """See `PagePool`."""
        if not self._row_holes and self._low == self._high:
            self.compact(self._is_movable)
        if self._row_holes:
            place = heappop(self._row_holes)
        elif self._low < self._high:
            place = self._low
            self._low += 1
        else:
            return -1
        handle = self._map.handle_at[place]
        self._map.take(handle)
        return handle

    def take_state(self, count: int) -> tuple[int, ...] | None:
        """See `PagePool`."""
        if len(self._state_holes) + self._high - self._low < count:
            self.compact(self._is_movable)
        if len(self._state_holes) + self._high - self._low < count:
            return None
        return tuple(self._take_state_page() for _ in range(count))

    def put_rows(self, page: int) -> None:
        """See `PagePool`."""
        place = self._map.place_of[page] if 0 <= page < self.num_pages else 0
        self._map.put(page)
        heappush(self._row_holes, place)
        self._settle()

    def put_state(self, pages: Iterable[int]) -> None:
        """See `PagePool`."""
        for page in pages:
            place = self._map.place_of[page] if 0 <= page < self.num_pages else 0
            self._map.put(page)
            heappush(self._state_holes, -place)
        self._settle()

    def fits(self, rows: int, states: int) -> bool:
        """See `PagePool`."""
        middle = self._high - self._low
        need = max(0, rows - len(self._row_holes)) + max(0, states - len(self._state_holes))
        if need <= middle:
            return True
        if rows + states > middle + len(self._row_holes) + len(self._state_holes):
            return False
        self.compact(self._is_movable)
        middle = self._high - self._low
        need = max(0, rows - len(self._row_holes)) + max(0, states - len(self._state_holes))
        return need <= middle

    def free_rows(self) -> int:
        """See `PagePool`."""
        return self._high - self._low + len(self._row_holes) + len(self._state_holes)

    def free_state_pages(self) -> int:
        """See `PagePool`."""
        return self.free_rows()

    def watermarks(self) -> tuple[int, int]:
        """Places used from the bottom, places used from the top, holes included."""
        return self._low, self.num_pages - self._high

    def place(self, page: int) -> int:
        """See `PagePool`."""
        return self._map.place_of[page]

    def is_free(self, page: int) -> bool:
        """See `PagePool`."""
        return not self._map.is_taken[page]

    def num_moves(self) -> int:
        """See `PagePool`."""
        return self._map.num_moves

    def compact(self, is_movable: Callable[[int], bool]) -> list[PageMove]:
        """See `PagePool`."""
        moves: list[PageMove] = []
        self._trim()
        while self._row_holes:
            source = self._outermost(range(self._low - 1, self._row_holes[0], -1), is_movable)
            if source < 0:
                break
            moves.append(self._map.move(self._map.handle_at[source], heappop(self._row_holes)))
            heappush(self._row_holes, source)
            self._trim()
        while self._state_holes:
            source = self._outermost(range(self._high, -self._state_holes[0]), is_movable)
            if source < 0:
                break
            moves.append(self._map.move(self._map.handle_at[source], -heappop(self._state_holes)))
            heappush(self._state_holes, -source)
            self._trim()
        self._moves += moves
        return moves

    def drain_moves(self) -> list[PageMove]:
        """See `PagePool`."""
        moves, self._moves = self._moves, []
        return moves

    def _take_state_page(self) -> int:
        if self._state_holes:
            place = -heappop(self._state_holes)
        else:
            self._high -= 1
            place = self._high
        handle = self._map.handle_at[place]
        self._map.take(handle)
        return handle

    def _settle(self) -> None:
        if self._is_eager:
            self.compact(self._is_movable)

    def _outermost(self, places: Iterable[int], is_movable: Callable[[int], bool]) -> int:
        for place in places:
            handle = self._map.handle_at[place]
            if self._map.is_taken[handle] and is_movable(handle):
                return place
        return -1

    def _trim(self) -> None:
        """Give holes at an end's rim back to the middle."""
        taken, at = self._map.is_taken, self._map.handle_at
        low, high = self._low, self._high
        while low and not taken[at[low - 1]]:
            low -= 1
        while high < self.num_pages and not taken[at[high]]:
            high += 1
        if low != self._low:
            self._low = low
            self._row_holes = [place for place in self._row_holes if place < low]
            heapify(self._row_holes)
        if high != self._high:
            self._high = high
            self._state_holes = [place for place in self._state_holes if -place >= high]
            heapify(self._state_holes)
