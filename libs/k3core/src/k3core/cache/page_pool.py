"""Who may have which page: the interface of a memory plan, and the two simple ones.

Callers hold page handles, 0..P - 1, which never change while held; `place` says where a
handle's bytes lie now. Handle and place differ only after a compaction has moved pages.
What must always hold: a page is free or taken, never both; freeing one twice is an error that
changes nothing.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from k3core.cache.spec import CacheError


@dataclass(frozen=True, slots=True)
class PageMove:
    """One page's bytes change place. Moves are executed in order."""

    src: int
    dst: int


class PagePool(Protocol):
    """Pages for MLA rows and for states."""

    num_pages: int

    def take_rows(self) -> int:
        """A page for MLA rows, or -1 if there is none."""
        ...

    def take_state(self, count: int) -> tuple[int, ...] | None:
        """`count` pages for one state, all or none."""
        ...

    def put_rows(self, page: int) -> None:
        """Give a page of rows back."""
        ...

    def put_state(self, pages: Iterable[int]) -> None:
        """Give a state's pages back."""
        ...

    def fits(self, rows: int, states: int) -> bool:
        """Whether so many pages of each kind could be taken now, compaction included."""
        ...

    def free_rows(self) -> int:
        """Pages that rows could take if states took none."""
        ...

    def free_state_pages(self) -> int:
        """Pages that states could take if rows took none."""
        ...

    def place(self, page: int) -> int:
        """Where a handle's bytes lie."""
        ...

    def num_moves(self) -> int:
        """Moves since the pool was made: places looked up before the last one may be stale."""
        ...

    def compact(self, is_movable: Callable[[int], bool]) -> list[PageMove]:
        """Pack what is taken; pages that may not move stay where they are."""
        ...

    def drain_moves(self) -> list[PageMove]:
        """Moves decided since the last call, to be executed before anything else."""
        ...

    def is_free(self, page: int) -> bool:
        """Whether nobody holds the page."""
        ...


class PageMap:
    """Handles to places: a permutation, so that a free handle has a place as well."""

    def __init__(self, num_pages: int) -> None:
        self.place_of = list(range(num_pages))
        self.handle_at = list(range(num_pages))
        self.is_taken = [False] * num_pages
        self.num_moves = 0

    def move(self, handle: int, place: int) -> PageMove:
        """Put a taken handle where a free one was; they change places."""
        other, old = self.handle_at[place], self.place_of[handle]
        assert self.is_taken[handle]
        assert not self.is_taken[other]
        self.num_moves += 1
        self.place_of[handle], self.place_of[other] = place, old
        self.handle_at[place], self.handle_at[old] = handle, other
        return PageMove(old, place)

    def take(self, handle: int) -> None:
        """Mark a free handle taken."""
        assert not self.is_taken[handle]
        self.is_taken[handle] = True

    def put(self, handle: int) -> None:
        """Mark a taken handle free.

        Raises:
            CacheError: if it is free already, or no page at all.
        """
        if not 0 <= handle < len(self.is_taken) or not self.is_taken[handle]:
            raise CacheError(f"page {handle} is not taken and cannot be freed")
        self.is_taken[handle] = False

    def pack(self, low: int, high: int, is_movable: Callable[[int], bool]) -> list[PageMove]:
        """Move taken pages of places low..high - 1 towards `low`."""
        moves: list[PageMove] = []
        hole, last = low, high - 1
        while True:
            while hole < last and self.is_taken[self.handle_at[hole]]:
                hole += 1
            while hole < last:
                handle = self.handle_at[last]
                if self.is_taken[handle] and is_movable(handle):
                    break
                last -= 1
            if hole >= last:
                return moves
            moves.append(self.move(self.handle_at[last], hole))


class FlatPool:
    """One pool of equal pages for both kinds: nothing is ever stranded in the wrong half."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._map = PageMap(num_pages)
        self._free = list(range(num_pages - 1, -1, -1))
        self._moves: list[PageMove] = []

    def take_rows(self) -> int:
        """See `PagePool`."""
        if not self._free:
            return -1
        page = self._free.pop()
        self._map.take(page)
        return page

    def take_state(self, count: int) -> tuple[int, ...] | None:
        """See `PagePool`."""
        if len(self._free) < count:
            return None
        return tuple(self.take_rows() for _ in range(count))

    def put_rows(self, page: int) -> None:
        """See `PagePool`."""
        self._map.put(page)
        self._free.append(page)

    def put_state(self, pages: Iterable[int]) -> None:
        """See `PagePool`."""
        for page in pages:
            self.put_rows(page)

    def fits(self, rows: int, states: int) -> bool:
        """See `PagePool`."""
        return rows + states <= len(self._free)

    def free_rows(self) -> int:
        """See `PagePool`."""
        return len(self._free)

    def free_state_pages(self) -> int:
        """See `PagePool`."""
        return len(self._free)

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
        moves = self._map.pack(0, self.num_pages, is_movable)
        self._moves += moves
        return moves

    def drain_moves(self) -> list[PageMove]:
        """See `PagePool`."""
        moves, self._moves = self._moves, []
        return moves


class SplitPools:
    """Rows and states each have their own pages, as engines with two pools have."""

    def __init__(self, num_row_pages: int, num_state_pages: int) -> None:
        self.num_pages = num_row_pages + num_state_pages
        self._border = num_row_pages
        self._map = PageMap(self.num_pages)
        self._rows = list(range(num_row_pages - 1, -1, -1))
        self._states = list(range(self.num_pages - 1, num_row_pages - 1, -1))
        self._moves: list[PageMove] = []

    def take_rows(self) -> int:
        """See `PagePool`."""
        if not self._rows:
            return -1
        page = self._rows.pop()
        self._map.take(page)
        return page

    def take_state(self, count: int) -> tuple[int, ...] | None:
        """See `PagePool`."""
        if len(self._states) < count:
            return None
        pages = tuple(self._states.pop() for _ in range(count))
        for page in pages:
            self._map.take(page)
        return pages

    def put_rows(self, page: int) -> None:
        """See `PagePool`."""
        self._map.put(page)
        self._rows.append(page)

    def put_state(self, pages: Iterable[int]) -> None:
        """See `PagePool`."""
        for page in pages:
            self._map.put(page)
            self._states.append(page)

    def fits(self, rows: int, states: int) -> bool:
        """See `PagePool`."""
        return rows <= len(self._rows) and states <= len(self._states)

    def free_rows(self) -> int:
        """See `PagePool`."""
        return len(self._rows)

    def free_state_pages(self) -> int:
        """See `PagePool`."""
        return len(self._states)

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
        moves = self._map.pack(0, self._border, is_movable)
        moves += self._map.pack(self._border, self.num_pages, is_movable)
        self._moves += moves
        return moves

    def drain_moves(self) -> list[PageMove]:
        """See `PagePool`."""
        moves, self._moves = self._moves, []
        return moves
