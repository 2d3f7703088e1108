"""The embedding cache: what a planned step needs stays, what goes is told once."""

import random

from k3core.scheduler.embeddings import EmbeddingCache


def test_cac_05_an_unreferenced_picture_makes_room_and_is_reported_once() -> None:
    cache = EmbeddingCache(10)
    assert cache.acquire(b"x", 6)
    cache.release(b"x")
    assert cache.acquire(b"y", 5)
    assert cache.drain_dropped() == (b"x",)
    assert cache.drain_dropped() == ()


def test_one_dropped_and_wanted_again_in_one_step_is_not_reported() -> None:
    cache = EmbeddingCache(8)
    for key in (b"a", b"b"):
        cache.acquire(key, 4)
        cache.release(key)
    assert cache.acquire(b"c", 4)
    assert cache.acquire(b"a", 4)
    assert cache.drain_dropped() == (b"b",)


def test_cac_05_a_picture_stays_until_its_last_occurrence_is_released() -> None:
    cache = EmbeddingCache(8)
    assert cache.acquire(b"a", 4)
    assert not cache.acquire(b"a", 4)
    cache.release(b"a")
    assert not cache.can_acquire(b"b", 6)
    cache.release(b"a")
    assert cache.can_acquire(b"b", 6)


def test_an_awaited_picture_gives_way_last_and_only_where_that_is_allowed() -> None:
    cache = EmbeddingCache(12)
    for key in (b"a", b"b"):
        cache.acquire(key, 4)
        cache.release(key)
    cache.await_again(b"a")
    cache.await_again(b"a")
    cache.give_up(b"a")
    assert cache.room(takes_awaited=False) == 8
    assert not cache.can_acquire(b"c", 9, takes_awaited=False)
    assert cache.can_acquire(b"c", 9)
    assert cache.acquire(b"c", 8)
    # The older of the two stayed, because it comes again.
    assert cache.drain_dropped() == (b"b",)
    cache.give_up(b"a")
    assert cache.room(takes_awaited=False) == 4


def test_another_size_under_one_key_is_never_served() -> None:
    cache = EmbeddingCache(20)
    cache.acquire(b"a", 4)
    assert not cache.holds(b"a", 5)
    assert not cache.can_acquire(b"a", 5)
    cache.release(b"a")
    assert cache.acquire(b"a", 5)


def test_used_and_free_always_make_the_whole() -> None:
    rng, cache, held = random.Random(3), EmbeddingCache(30), list[bytes]()
    for _ in range(2000):
        key = bytes([rng.randrange(9)])
        count = 1 + key[0]
        if rng.random() < 0.6 and cache.can_acquire(key, count):
            cache.acquire(key, count)
            held.append(key)
        elif held:
            cache.release(held.pop(rng.randrange(len(held))))
        assert cache.used + cache.free == 30
        assert cache.used >= sum(1 + each[0] for each in set(held))
        assert not set(cache.drain_dropped()) & set(held)
