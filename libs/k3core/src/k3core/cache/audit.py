"""Recomputes every count of a cache from scratch and says what does not agree.

For tests, the simulator and a debug switch of the workers: it walks everything and is slow.
"""

from collections.abc import Iterable

from k3core.cache.coordinator import PrefixCache
from k3core.cache.hashing import DIGEST_BYTES
from k3core.cache.state_manager import SlotState


def audit(cache: PrefixCache, extra_pins: Iterable[int] = ()) -> list[str]:
    """Everything that is wrong with a cache; an empty list if it is sound.

    Args:
        cache: between steps or with steps in flight.
        extra_pins: unit ids held by someone other than a sequence, once for each hold.
    """
    return [
        *_audit_references(cache, extra_pins),
        *_audit_pages(cache),
        *_audit_index(cache),
        *_audit_states(cache),
    ]


def leaked_pages(cache: PrefixCache) -> int:
    """Pages that are neither free, nor held by a sequence, nor kept as cache."""
    owned = {unit // cache.config.page_units for unit in cache.paged.index.values()}
    for sequence in cache.sequences():
        owned.update(unit // cache.config.page_units for unit in sequence.units)
        owned.update(sequence.live)
    for checkpoint in cache.states.sealed.values():
        owned.update(checkpoint.pages)
    for pages in cache.states.slots_in_flight():
        owned.update(pages)
    return sum(
        not cache.pool.is_free(page) and page not in owned for page in range(cache.pool.num_pages)
    )


def _audit_references(cache: PrefixCache, extra_pins: Iterable[int]) -> list[str]:
    faults: list[str] = []
    counts: dict[int, int] = {}
    for sequence in cache.sequences():
        for unit in sequence.units:
            counts[unit] = counts.get(unit, 0) + 1
    for unit in extra_pins:
        counts[unit] = counts.get(unit, 0) + 1
    for unit, held in enumerate(cache.paged.refs):
        if held != counts.get(unit, 0):
            faults.append(f"unit {unit} has {held} references, {counts.get(unit, 0)} holders")
        if not held and cache.paged.is_used[unit] and cache.paged.digest[unit] is None:
            faults.append(f"unit {unit} is used, not held and not in the index")
    return faults


def _audit_pages(cache: PrefixCache) -> list[str]:
    faults: list[str] = []
    size, paged, pool = cache.config.page_units, cache.paged, cache.pool
    idle = 0
    state_pages = {p for s in cache.sequences() for p in s.live}
    for checkpoint in cache.states.sealed.values():
        state_pages.update(checkpoint.pages)
    for pages in cache.states.slots_in_flight():
        state_pages.update(pages)
    for page in range(pool.num_pages):
        units = [u for u in range(page * size, (page + 1) * size) if paged.is_used[u]]
        if units and (pool.is_free(page) or page in state_pages):
            faults.append(f"page {page} holds rows and is free or a state's")
        if not units and page not in state_pages and not pool.is_free(page):
            faults.append(f"page {page} is taken and holds nothing")
        if page in state_pages and pool.is_free(page):
            faults.append(f"page {page} holds a state and is free")
        idle += bool(units) and not any(paged.refs[u] for u in units)
    if idle != paged.num_idle_pages:
        faults.append(f"{paged.num_idle_pages} pages are counted idle, {idle} are")
    return faults


def _audit_index(cache: PrefixCache) -> list[str]:
    faults: list[str] = []
    paged = cache.paged
    children: dict[int, int] = {}
    for digest, unit in paged.index.items():
        parent = paged.parent[unit]
        if paged.digest[unit] != digest or len(digest) != DIGEST_BYTES:
            faults.append(f"unit {unit} is indexed under another name")
        if parent >= 0:
            children[parent] = children.get(parent, 0) + 1
            if paged.digest[parent] is None:
                faults.append(f"unit {unit} outlived its parent {parent}")
    faults += [
        f"unit {unit} counts {paged.children[unit]} children"
        for unit in paged.index.values()
        if paged.children[unit] != children.get(unit, 0)
    ]
    return faults


def _audit_states(cache: PrefixCache) -> list[str]:
    faults: list[str] = []
    states, unit = cache.states, cache.config.unit_tokens
    seen: set[int] = set()
    for digest, checkpoint in states.sealed.items():
        if digest not in cache.paged.index:
            faults.append(f"the state at {checkpoint.position} has lost its rows")
        elif cache.paged.depth[cache.paged.index[digest]] + 1 != checkpoint.position // unit:
            faults.append(f"the state at {checkpoint.position} stands at another depth")
        if checkpoint.position % unit:
            faults.append(f"the state at {checkpoint.position} is not on a unit")
        if states.slots.get(checkpoint.pages[0]) is not SlotState.SEALED:
            faults.append(f"the slot of the state at {checkpoint.position} is not sealed")
        if seen & set(checkpoint.pages):
            faults.append(f"the state at {checkpoint.position} shares a page")
        seen.update(checkpoint.pages)
    idle = sum(len(c.pages) for c in states.sealed.values() if not c.pins)
    if idle != states.num_idle_pages:
        faults.append(f"{states.num_idle_pages} state pages are counted idle, {idle} are")
    return faults
