"""Three memory plans behind one interface: nothing is lost, nothing is handed out twice."""

import random

import pytest

from k3core.cache.page_pool import FlatPool, PageMove, PagePool, SplitPools
from k3core.cache.spec import CacheError
from k3core.cache.two_ended_pool import TwoEndedPool


def _always(_: int) -> bool:
    return True


def _two_ended(num_pages: int, is_eager: bool) -> TwoEndedPool:
    return TwoEndedPool(num_pages, is_eager, _always)


class Memory:
    """Bytes by place, moved as a pool says."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.at: dict[int, int] = {}

    def write(self, page: int, value: int) -> None:
        self.follow()
        self.at[self.pool.place(page)] = value

    def read(self, page: int) -> int:
        self.follow()
        return self.at[self.pool.place(page)]

    def follow(self) -> None:
        for move in self.pool.drain_moves():
            self.at[move.dst] = self.at.pop(move.src)


def test_a_lazy_arena_fills_the_hole_and_an_eager_one_closes_it() -> None:
    lazy, eager = _two_ended(20, False), _two_ended(20, True)
    for pool in (lazy, eager):
        rows = [pool.take_rows() for _ in range(6)]
        assert pool.take_state(4)
        assert pool.take_state(4)
        pool.put_rows(rows[1])
        assert pool.free_rows() + 5 + 8 == 20
    assert lazy.watermarks() == (6, 8)
    assert lazy.drain_moves() == []
    assert eager.watermarks() == (5, 8)
    assert eager.drain_moves() == [PageMove(5, 1)]
    assert lazy.place(lazy.take_rows()) == 1
    assert lazy.watermarks() == (6, 8)


@pytest.mark.parametrize(
    "make", [FlatPool, lambda n: SplitPools(n, 4), lambda n: _two_ended(n, True)]
)
def test_freeing_twice_is_an_error_that_changes_nothing(make: type[FlatPool]) -> None:
    pool = make(8)
    page = pool.take_rows()
    pool.put_rows(page)
    free = pool.free_rows()
    with pytest.raises(CacheError):
        pool.put_rows(page)
    assert pool.free_rows() == free


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_eager", [True, False])
def test_contents_follow_their_handles_through_two_thousand_operations(
    seed: int, is_eager: bool
) -> None:
    rng = random.Random(seed)
    pool = _two_ended(40, is_eager)
    memory, rows, states = Memory(pool), dict[int, int](), dict[tuple[int, ...], int]()
    for number in range(2000):
        kind = rng.random()
        used = len(rows) + sum(map(len, states))
        assert pool.free_rows() + used == 40
        if kind < 0.35:
            page = pool.take_rows()
            assert (page < 0) == (used == 40)
            if page >= 0:
                memory.write(page, number)
                rows[page] = number
        elif kind < 0.5:
            pages = pool.take_state(3)
            assert (pages is None) == (used > 37)
            for page in pages or ():
                memory.write(page, number)
            if pages:
                states[pages] = number
        elif kind < 0.8 and rows:
            page = rng.choice(sorted(rows))
            assert memory.read(page) == rows.pop(page)
            memory.at.pop(pool.place(page))
            pool.put_rows(page)
        elif states:
            pages = rng.choice(sorted(states))
            value = states.pop(pages)
            assert [memory.read(page) for page in pages] == [value] * 3
            for page in pages:
                memory.at.pop(pool.place(page))
            pool.put_state(pages)
        for page, value in rows.items():
            assert memory.read(page) == value


def test_a_pinned_page_is_never_moved() -> None:
    pinned: set[int] = set()
    pool = TwoEndedPool(10, False, lambda page: page not in pinned)
    rows = [pool.take_rows() for _ in range(6)]
    pool.put_rows(rows[0])
    pinned.add(rows[5])
    pool.compact(lambda page: page not in pinned)
    assert pool.place(rows[5]) == 5
    assert pool.place(rows[4]) == 0
    pinned.clear()
    pool.compact(_always)
    assert pool.watermarks()[0] == 5


def test_a_flat_arena_packs_towards_its_start() -> None:
    pool = FlatPool(6)
    pages = [pool.take_rows() for _ in range(6)]
    for page in pages[:4]:
        pool.put_rows(page)
    moves = pool.compact(_always)
    assert sorted(pool.place(page) for page in pages[4:]) == [0, 1]
    assert moves == pool.drain_moves()
    assert pool.num_moves() == 2
