"""Chooses the page pool that a configuration names."""

from collections.abc import Callable

from k3core.cache.page_pool import FlatPool, PagePool, SplitPools
from k3core.cache.spec import CacheConfig
from k3core.cache.two_ended_pool import TwoEndedPool


def make_pool(config: CacheConfig, is_movable: Callable[[int], bool]) -> PagePool:
    """The pool that a configuration names.

    Args:
        config: its `memory`, sizes.
        is_movable: asked for a handle before a pool moves it of its own accord.
    """
    if config.memory == "flat":
        return FlatPool(config.num_pages)
    if config.memory == "two_pools":
        return SplitPools(config.num_pages, config.num_slots * config.state_groups)
    return TwoEndedPool(config.num_pages, config.memory == "two_ended_eager", is_movable)
