"""Host memory behind the arena: bounded, never dropping what is being copied back."""

import random

from k3core.cache.host_tier import HostTier


def _name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_the_oldest_goes_when_room_is_needed_and_its_bytes_are_named_once() -> None:
    tier = HostTier(30, 10, 20)
    for number in range(3):
        assert tier.offer_unit(_name(number), 4, number)
    assert [spill.unit for spill in tier.drain_spills()] == [0, 1, 2]
    assert tier.offer_state(_name(9), 4, (7,))
    assert set(tier.units) == {_name(2)}
    assert tier.drain_drops() == [1, 2]
    assert tier.used_bytes == 30


def test_what_is_pinned_stays_and_the_newcomer_is_refused() -> None:
    tier = HostTier(10, 10, 20)
    tier.offer_unit(_name(1), 4, 0)
    entry = tier.units[_name(1)]
    tier.pin([entry])
    assert not tier.offer_unit(_name(2), 4, 1)
    tier.unpin([entry])
    assert tier.offer_unit(_name(2), 4, 1)
    assert set(tier.units) == {_name(2)}


def test_one_offered_and_dropped_within_a_step_owes_no_copy() -> None:
    tier = HostTier(10, 10, 20)
    tier.offer_unit(_name(1), 4, 5)
    tier.offer_unit(_name(2), 4, 6)
    assert [spill.unit for spill in tier.drain_spills()] == [6]
    assert tier.drain_drops() == []


def test_a_second_offer_of_the_same_prefix_is_no_second_copy() -> None:
    tier = HostTier(100, 10, 20)
    assert tier.offer_unit(_name(1), 4, 5)
    assert tier.offer_unit(_name(1), 4, 8)
    assert len(tier.drain_spills()) == 1


def test_losing_what_was_replaced_meanwhile_does_not_touch_its_successor() -> None:
    tier = HostTier(100, 10, 20)
    tier.offer_unit(_name(1), 4, 5)
    old = tier.units[_name(1)]
    tier.lose([old, old])
    tier.offer_unit(_name(1), 4, 6)
    tier.lose([old])
    assert tier.units[_name(1)].host != old.host
    assert tier.used_bytes == 10


def test_every_named_byte_is_freed_once_and_the_bound_holds() -> None:
    rng, tier, alive = random.Random(1), HostTier(100, 10, 30), set[int]()
    for number in range(3000):
        digest = _name(rng.randrange(40))
        if rng.random() < 0.5:
            tier.offer_unit(digest, 4, number)
        else:
            tier.offer_state(digest, 4, (number,))
        if rng.random() < 0.4:
            alive |= {spill.host for spill in tier.drain_spills()}
            for host in tier.drain_drops():
                alive.remove(host)
            held = {entry.host for table in (tier.units, tier.states) for entry in table.values()}
            assert alive == held
        assert tier.used_bytes == 10 * len(tier.units) + 30 * len(tier.states) <= 100
