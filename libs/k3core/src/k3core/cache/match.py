"""The law of a hit: a pure function of the index, the sealed checkpoints and one sequence.

F is the longest matched MLA coverage; a drafter that drops shortens it by one unit; the hit is
the deepest sealed checkpoint on the path that is neither beyond that nor beyond n - 1.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from operator import length_hint
from typing import Literal, TypeAlias

from k3core.cache.host_tier import HostEntry, HostTier
from k3core.cache.paged_manager import PagedManager
from k3core.cache.positions import drop_tokens, recomputed_tokens
from k3core.cache.sequence import Sequence
from k3core.cache.spec import CacheConfig
from k3core.cache.state_manager import Checkpoint, StateManager

GapReason: TypeAlias = Literal["", "no_checkpoint", "evicted", "drafter", "partial", "same_step"]


@dataclass(frozen=True, slots=True)
class Match:
    """What a lookup found. Nothing was changed by finding it.

    Attributes:
        num_tokens: n, tokens looked up.
        matched: F, tokens whose rows are here.
        hit: tokens that need not be computed; 0 or the checkpoint's position.
        checkpoint: what is restored, None if hit is 0.
        junction: position to promote, 0 for none.
        gap: rows that are here, up to n - 1, and cannot be used.
        reason: why, "" without a gap.
        unit_tokens: U.
        host_units: the last units of the hit, if they are in host memory.
        local_hit: the hit without host memory.
        host_state: where the state is, if it is in host memory; `checkpoint` is None then.
        awaits: digest of a checkpoint that a running request will seal deeper on this path,
            b"" for none.
    """

    num_tokens: int
    matched: int
    hit: int
    checkpoint: Checkpoint | None
    junction: int
    gap: int
    reason: GapReason
    unit_tokens: int = 1
    awaits: bytes = b""
    host_units: tuple[HostEntry, ...] = ()
    host_state: HostEntry | None = None
    local_hit: int = 0

    @property
    def resident(self) -> int:
        """Leading tokens of the hit whose rows are in the arena."""
        return self.hit - len(self.host_units) * self.unit_tokens


def find_match(
    config: CacheConfig,
    paged: PagedManager,
    states: StateManager,
    sequence: Sequence,
    pending: dict[bytes, int],
    tier: HostTier | None = None,
) -> Match:
    """Look a sequence up; its digests must cover its full units.

    Args:
        config: policies and sizes.
        paged: the index.
        states: the checkpoints.
        sequence: what is looked up.
        pending: digests of checkpoints that running requests are about to seal.
        tier: host memory behind the arena, if there is any.
    """
    unit, digests = config.unit_tokens, sequence.digests
    n = len(sequence.tokens)
    resident = units = paged.match(digests)
    while tier is not None and units < len(digests) and digests[units] in tier.units:
        units += 1
    reach = _reach(config, n, units)
    checkpoint = _deepest_sealed(config, digests, paged, states, reach)
    local_hit = hit = checkpoint.position if checkpoint else 0
    host_state = _deeper_in(config, tier, digests, reach, hit)
    if host_state is not None:
        checkpoint, hit = None, host_state.position
    usable = min(units * unit, (n - 1) // unit * unit)
    gap = max(0, usable - hit)
    awaits = deepest(config, digests, pending, _reach(config, n, len(digests)), hit // unit)
    reason: GapReason = ""
    if gap:
        known = min(usable, resident * unit)
        reason = "same_step" if awaits else _reason(config, paged, states, sequence, hit, known)
    junction = 0
    if gap and config.promotion != "never":
        junction = max(0, units * unit - drop_tokens(config))
    borrowed = digests[resident : hit // unit]
    return Match(
        num_tokens=n,
        matched=units * unit,
        hit=hit,
        checkpoint=checkpoint,
        junction=junction,
        gap=gap,
        reason=reason,
        unit_tokens=unit,
        awaits=awaits,
        host_units=tuple([tier.units[each] for each in borrowed]) if tier is not None else (),
        host_state=host_state,
        local_hit=local_hit,
    )


def deepest(
    config: CacheConfig,
    digests: Items[bytes],
    known: Mapping[bytes, object],
    units: int,
    above: int = 0,
) -> bytes:
    """The deepest of the first `units` digests that is known, b"" if none is.

    The first `above` do not count.
    """
    if not known or units <= above:
        return b""
    step = 1 if config.partial_hits else config.grid // config.unit_tokens
    path = digests[(above + step) // step * step - 1 : units : step]
    # Walked in C, a third faster than by `filter`: what was not walked yet says where it ended.
    rest = reversed(path)
    return b"" if known.keys().isdisjoint(rest) else path[length_hint(rest)]


def _confirmed(
    config: CacheConfig, digests: Items[bytes], states: StateManager, found: bytes
) -> bytes:
    """The deepest checkpoint up to `found` of which a writer went on as this sequence does."""
    while found:
        place = states.sealed[found].position // config.unit_tokens
        if not states.sealed[found].successors.isdisjoint(digests[place : place + 1]):
            return found
        found = deepest(config, digests, states.sealed, place - 1)
    return b""


def _deepest_sealed(
    config: CacheConfig,
    digests: Items[bytes],
    paged: PagedManager,
    states: StateManager,
    reach: int,
) -> Checkpoint | None:
    parts = paged.stretches(digests, 0, reach)
    tries = (deepest(config, digests, states.sealed, high, low) for low, high in parts)
    found = next(filter(None, tries), b"")
    if config.is_drop_strict:
        found = _confirmed(config, digests, states, found)
    return states.sealed[found] if found else None


def _deeper_in(
    config: CacheConfig, tier: HostTier | None, digests: Items[bytes], reach: int, hit: int
) -> HostEntry | None:
    """A state in host memory that goes beyond the arena's."""
    if tier is None:
        return None
    stored = deepest(config, digests, tier.states, reach, hit // config.unit_tokens)
    return tier.states[stored] if stored else None


def _reach(config: CacheConfig, n: int, units: int) -> int:
    """Units at whose end a checkpoint may be restored."""
    unit = config.unit_tokens
    return max(0, min(units * unit - drop_tokens(config), n - recomputed_tokens(config))) // unit


def _reason(
    config: CacheConfig,
    paged: PagedManager,
    states: StateManager,
    sequence: Sequence,
    hit: int,
    usable: int,
) -> GapReason:
    unit, spared = config.unit_tokens, drop_tokens(config)
    parts = paged.stretches(sequence.digests, hit // unit, usable // unit)
    windows = [sequence.digests[low:high] for low, high in parts]
    # What a drafter gives up is its loss alone if everything below it was restored.
    restorable = max(0, len(sequence.tokens) - recomputed_tokens(config)) // unit * unit
    is_replayed = restorable < usable
    if not all(map(states.sealed.keys().isdisjoint, windows)):
        return "drafter" if spared or is_replayed else "partial"
    if not all(map(paged.lost_state.isdisjoint, windows)):
        return "evicted"
    if (spared and usable - hit <= spared) or (is_replayed and hit == restorable):
        return "drafter"
    return "no_checkpoint"
