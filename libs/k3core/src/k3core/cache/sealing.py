"""Makes written states visible, and keeps a path from holding more of them than it may."""

from k3core.cache.evictor import Evictor
from k3core.cache.fence import StepFence
from k3core.cache.match import deepest
from k3core.cache.paged_manager import PagedManager
from k3core.cache.positions import StateClass, is_rolling, prompt_targets
from k3core.cache.sequence import Sequence
from k3core.cache.spec import CacheConfig, CacheError
from k3core.cache.state_manager import Checkpoint, SlotState, StateManager
from k3core.cache.stats import CacheStats, count


class Sealer:
    """The one way a slot becomes a checkpoint."""

    def __init__(
        self,
        config: CacheConfig,
        paged: PagedManager,
        states: StateManager,
        evictor: Evictor,
        fence: StepFence,
        stats: CacheStats,
    ) -> None:
        self._config = config
        self._paged = paged
        self._states = states
        self._evictor = evictor
        self._fence = fence
        self._stats = stats

    def seal(
        self,
        sequence: Sequence,
        position: int,
        pages: tuple[int, ...],
        reason: StateClass,
        epoch: int,
    ) -> bool:
        """A written state becomes visible; True if it did, False if one was there already.

        Raises:
            CacheError: if the position is not the end of a unit whose rows are published.
        """
        unit = self._config.unit_tokens
        place = position // unit
        if position % unit or not 0 < place <= sequence.num_published:
            raise CacheError(f"no checkpoint can stand at {position}")
        digest = sequence.digests[place - 1]
        checkpoint = Checkpoint(
            digest=digest,
            position=position,
            pages=pages,
            codec=self._config.codec,
            reason=reason,
            unit=sequence.units[place - 1],
            epoch=epoch,
            previous=self._previous(sequence, place - 1),
            successors=set(sequence.digests[place : place + 1]),
            number=0,
        )
        is_new = self._states.seal(checkpoint)
        if is_new:
            count(self._stats.exports, reason.name.lower())
            self._paged.lost_state.discard(checkpoint.digest)
            self._paged.note_state(checkpoint.unit)
            self._replace_rolling(sequence, checkpoint)
            if self._config.path_cap > 0:
                # After the step: what it restored from is locked until then.
                self._fence.after(lambda: self._trim_path(sequence, checkpoint))
        else:
            self._stats.refused_states += 1
        return is_new

    def add_successors(self, sequence: Sequence) -> None:
        """This sequence would have written these too: it goes on from them in its own way."""
        unit, digests = self._config.unit_tokens, sequence.digests
        for position in prompt_targets(self._config, sequence.prompt_length, 0):
            known = self._states.sealed.get(digests[position // unit - 1])
            if known is not None:
                known.successors.update(digests[position // unit : position // unit + 1])

    def can_donate(self, sequence: Sequence) -> bool:
        """Whether the live state may become a checkpoint as it is."""
        position = sequence.num_computed
        return (
            bool(sequence.live)
            and position > 0
            and position % self._config.unit_tokens == 0
            and (self._config.partial_hits or position % self._config.grid == 0)
            and self._config.codec == "raw"
            and self._states.slots.get(sequence.live[0]) == SlotState.RESERVED
        )

    def _previous(self, sequence: Sequence, units: int) -> int:
        if self._config.eviction != "marconi":
            return 0
        found = deepest(self._config, sequence.digests, self._states.sealed, units)
        return self._states.sealed[found].position if found else 0

    def _replace_rolling(self, sequence: Sequence, checkpoint: Checkpoint) -> None:
        position = checkpoint.position
        if position <= sequence.prompt_length or not is_rolling(self._config, position):
            return
        older = self._states.sealed.get(sequence.rolling)
        if older is not None and not older.pins and not older.hits:
            self._evictor.evict_state(older, is_surplus=True)
        sequence.rolling = checkpoint.digest

    def _trim_path(self, sequence: Sequence, newest: Checkpoint) -> None:
        """Keep at most `path_cap` states on this path: shallow ones go, forks and the tail stay."""
        path = [
            self._states.sealed[d]
            for d in filter(self._states.sealed.__contains__, sequence.digests)
        ]
        surplus = len(path) - self._config.path_cap
        for checkpoint in path[:-1]:
            if surplus <= 0:
                return
            is_exempt = (
                checkpoint is newest
                or checkpoint.pins
                or checkpoint.reason == StateClass.JUNCTION
                or self._paged.children[checkpoint.unit] > 1
            )
            if not is_exempt:
                self._evictor.evict_state(checkpoint, is_surplus=True)
                surplus -= 1
