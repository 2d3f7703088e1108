"""Holds what is cached of a path: its rows, its deepest state, and where they lie.

For transfers of what no running request holds any more.
"""

from dataclasses import dataclass

from k3core.cache.coordinator import PrefixCache
from k3core.cache.match import deepest
from k3core.cache.sequence import Sequence
from k3core.cache.state_manager import Checkpoint


@dataclass(slots=True, eq=False)
class PathPin:
    """What `pin_path` holds, until `unpin_path`."""

    units: list[int]
    pages: frozenset[int]
    checkpoint: Checkpoint | None


def pin_path(cache: PrefixCache, sequence: Sequence) -> PathPin:
    """Keep every cached unit of a sequence's path, and its deepest state, from being evicted or moved."""
    matched = cache.paged.match(sequence.digests)
    units = [cache.paged.index[digest] for digest in sequence.digests[:matched]]
    found = deepest(cache.config, sequence.digests, cache.states.sealed, matched)
    checkpoint = cache.states.sealed[found] if found else None
    cache.paged.reference(units)
    size = cache.config.page_units
    pages = {unit // size for unit in (*units, *sequence.units)} | set(sequence.live)
    if checkpoint is not None:
        cache.states.pin(checkpoint)
        pages |= set(checkpoint.pages)
    cache.pin_pages(pages)
    return PathPin(units, frozenset(pages), checkpoint)


def unpin_path(cache: PrefixCache, pin: PathPin, others: list[PathPin]) -> None:
    """Let go; pages that another open pin names stay where they are."""
    cache.unpin_pages(pin.pages - frozenset[int]().union(*(other.pages for other in others)))
    if pin.checkpoint is not None:
        cache.states.unpin(pin.checkpoint)
    cache.paged.release(pin.units)
