"""Reserves everything that running a sequence takes, or nothing."""

from collections.abc import Container
from dataclasses import dataclass, field

from k3core.cache.evictor import Evictor
from k3core.cache.host_tier import HostEntry, HostTier
from k3core.cache.match import Match
from k3core.cache.paged_manager import PagedManager
from k3core.cache.sequence import Sequence
from k3core.cache.spec import CacheConfig
from k3core.cache.state_manager import Checkpoint, StateManager
from k3core.cache.stats import CacheStats


@dataclass(slots=True, eq=False)
class Admission:
    """Reservations of one `begin`, until `commit` or `rollback`.

    Attributes:
        sequence: what was admitted.
        match: what it reuses.
        source: pages of the checkpoint to restore, () if there is nothing to copy.
        checkpoint: pinned until `end_restore`; None if nothing is copied.
        borrowed: entries of host memory, pinned until `end_restore`.
        is_resumed: the sequence ran before; its lookup is counted apart.
    """

    sequence: Sequence
    match: Match
    source: tuple[int, ...]
    checkpoint: Checkpoint | None
    borrowed: list[HostEntry] = field(default_factory=list[HostEntry])
    is_resumed: bool = False

    def unreadable(self, hosts: Container[int]) -> list[HostEntry]:
        """What it borrowed from bytes of host memory that cannot be read, and all behind that.

        Rows behind a hole are of no use to anyone until the hole is computed again; a state is
        lost with the rows before it.

        Args:
            hosts: names of the bytes (`HostEntry.host`).
        """
        units, state = self.match.host_units, self.match.host_state
        first = next((i for i, entry in enumerate(units) if entry.host in hosts), len(units))
        lost = list(units[first:])
        if state is not None and (lost or state.host in hosts):
            lost.append(state)
        return lost


class Admitter:
    """Begins sequences; `sequences` holds those that have pages, by identity."""

    def __init__(
        self,
        config: CacheConfig,
        paged: PagedManager,
        states: StateManager,
        evictor: Evictor,
        stats: CacheStats,
        tier: HostTier | None = None,
    ) -> None:
        self._config = config
        self._paged = paged
        self._states = states
        self._evictor = evictor
        self._stats = stats
        self._tier = tier
        self.sequences: dict[int, Sequence] = {}

    def begin(self, sequence: Sequence, match: Match, is_alone: bool = False) -> Admission | None:
        """Reserve rows for all tokens and a live state, or change nothing that can be observed.

        Args:
            sequence: hashed, not running.
            match: of a `lookup` since the last change.
            is_alone: nothing else runs that could give pages back: if the hit itself stands in
                the way of the room that is needed, it is taken over or passed up.

        Returns:
            None if there is no room now.
        """
        admission = self._try_begin(sequence, match)
        if admission is None and is_alone and match.hit:
            admission = self._take_over(sequence, match) or self._try_begin(
                sequence, _without_hit(match)
            )
        return admission

    def _try_begin(self, sequence: Sequence, match: Match) -> Admission | None:
        assert not sequence.units
        assert not sequence.live
        unit, groups = self._config.unit_tokens, self._states.groups
        reused = [self._paged.index[d] for d in sequence.digests[: match.resident // unit]]
        fresh = -(-match.num_tokens // unit) - len(reused)
        last = reused[-1] if reused else -1
        self._paged.reference(reused)
        if match.checkpoint is not None:
            self._states.pin(match.checkpoint)
        borrowed = [*match.host_units, *((match.host_state,) if match.host_state else ())]
        if self._tier is not None:
            self._tier.pin(borrowed)
        rows = self._paged.pages_for(-1, last, fresh)
        if not self._evictor.make_room(rows, groups):
            if match.checkpoint is not None:
                self._states.unpin(match.checkpoint)
            if self._tier is not None:
                self._tier.unpin(borrowed)
            self._paged.release(reused)
            return None
        self._fill(sequence, match, reused, fresh)
        live = self._states.reserve(groups)
        assert live is not None
        sequence.live = live
        source = match.checkpoint.pages if match.checkpoint else ()
        return Admission(sequence, match, source, match.checkpoint, borrowed)

    def _take_over(self, sequence: Sequence, match: Match) -> Admission | None:
        """Admit with the checkpoint itself as the live state; for when no slot is left."""
        checkpoint = match.checkpoint
        if checkpoint is None or checkpoint.pins or checkpoint.codec != "raw":
            return None
        unit = self._config.unit_tokens
        reused = [self._paged.index[d] for d in sequence.digests[: match.resident // unit]]
        fresh = -(-match.num_tokens // unit) - len(reused)
        self._paged.reference(reused)
        self._states.pin(checkpoint)
        has_room = self._evictor.make_room(self._paged.pages_for(-1, reused[-1], fresh), 0)
        self._states.unpin(checkpoint)
        if not has_room:
            self._paged.release(reused)
            return None
        sequence.live = self._states.take_over(checkpoint)
        self._paged.lost_state.add(checkpoint.digest)
        self._stats.takeovers += 1
        self._fill(sequence, match, reused, fresh)
        return Admission(sequence, match, (), None)

    def _fill(self, sequence: Sequence, match: Match, reused: list[int], fresh: int) -> None:
        sequence.units = reused
        sequence.num_published = len(reused)
        sequence.open_page = self._paged.grow(sequence.units, -1, fresh)
        sequence.num_computed = match.hit
        sequence.target_length = match.num_tokens
        self.sequences[id(sequence)] = sequence


def _without_hit(match: Match) -> Match:
    return Match(
        num_tokens=match.num_tokens,
        matched=match.matched,
        hit=0,
        checkpoint=None,
        junction=match.junction,
        gap=match.gap + match.hit,
        reason="evicted",
        unit_tokens=match.unit_tokens,
    )
