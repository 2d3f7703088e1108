"""Names that are left alone for a while."""

from k3core.transfer.quarantine import Quarantine


def test_a_name_is_left_alone_until_it_is_taken_back() -> None:
    table = Quarantine(for_s=60, limit=8)
    table.add("a")
    assert "a" in table
    assert "b" not in table
    table.discard("a")
    table.discard("never there")
    assert "a" not in table


def test_time_ends_a_quarantine() -> None:
    table = Quarantine(for_s=0, limit=8)
    table.add("a")
    assert "a" not in table


def test_the_oldest_give_way_when_there_are_too_many() -> None:
    table = Quarantine(for_s=60, limit=3)
    for name in ("a", "b", "c", "a", "d"):
        table.add(name)
    assert len(table) == 3
    assert [name in table for name in ("a", "b", "c", "d")] == [True, False, True, True]
