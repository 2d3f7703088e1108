"""Cutting transfers: nothing lost, nothing twice, nothing over the bound."""

from hypothesis import given
from hypothesis import strategies as st

from k3core.transfer.base import Write
from k3core.transfer.batches import index_batches, write_batches

sizes = st.lists(st.integers(0, 300), max_size=20)


@given(sizes, st.integers(1, 200))
def test_cut_writes_move_the_same_bytes_in_the_same_order(lengths: list[int], bound: int) -> None:
    writes, place = [], 0
    for length in lengths:
        writes.append(Write(place, 10_000 - place, length))
        place += length
    batches = list(write_batches(writes, bound))

    def moves(some: list[Write]) -> list[tuple[int, int]]:
        return [(w.source + i, w.destination + i) for w in some for i in range(w.size_bytes)]

    assert moves([write for batch in batches for write in batch]) == moves(writes)
    totals = [sum(write.size_bytes for write in batch) for batch in batches]
    assert all(0 < total <= bound for total in totals)
    assert all(total == bound for total in totals[:-1])


@given(sizes, st.integers(1, 200))
def test_whole_things_are_batched_in_order_and_only_giants_pass_the_bound(
    lengths: list[int], bound: int
) -> None:
    batches = list(index_batches(lengths, bound))
    assert [index for batch in batches for index in batch] == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or sum(lengths[index] for index in batch) <= bound
