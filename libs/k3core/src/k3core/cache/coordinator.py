"""One prefix cache over MLA units and KDA checkpoints: the only door to both.

A sequence enters with its tokens and identity. `lookup` says what could be reused and changes
nothing; `begin` reserves everything that running it takes, or nothing; `commit` makes the
admission count, `rollback` undoes it. While it runs, `grow`, `reserve_exports`, `advance` and
`seal` move it on; `finish` lets go. What must always hold: a hit is a sealed checkpoint on
exactly this prefix with all rows before it resident; a sealed checkpoint's bytes never change.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from k3core.cache.block_pool import PageMove, make_pool
from k3core.cache.evictor import Evictor
from k3core.cache.fence import StepFence
from k3core.cache.hashing import ImageMark, extend_digests, root_digest
from k3core.cache.match import Match, deepest, find_match
from k3core.cache.paged_manager import PagedManager
from k3core.cache.positions import StateClass, decode_targets, is_rolling, prompt_targets
from k3core.cache.sequence import Sequence
from k3core.cache.spec import CacheConfig, CacheError
from k3core.cache.state_manager import Checkpoint, SlotState, StateManager
from k3core.cache.stats import CacheStats, count


@dataclass(slots=True, eq=False)
class Admission:
    """Reservations of one `begin`, until `commit` or `rollback`.

    Attributes:
        sequence: what was admitted.
        match: what it reuses.
        source: pages of the checkpoint to restore, () if there is nothing to copy.
        checkpoint: pinned until `end_restore`; None if nothing is copied.
        is_resumed: the sequence ran before; its lookup is counted apart.
    """

    sequence: Sequence
    match: Match
    source: tuple[int, ...]
    checkpoint: Checkpoint | None
    is_resumed: bool = False


class PrefixCache:
    """The index, the pages and the checkpoints of one worker.

    Args:
        config: sizes and policies; checked here.
        namespace: identity of model, weights, dtype, layout and partition
            (`hashing.namespace_digest`); two caches share digests only if it is equal.

    Raises:
        CacheError: if the configuration contradicts itself.
    """

    def __init__(self, config: CacheConfig, namespace: bytes = b"") -> None:
        config.check()
        self.config = config
        self.namespace = namespace
        self.fence = StepFence()
        self.stats = CacheStats()
        self.pool = make_pool(config, self._is_movable)
        self.paged = PagedManager(config, self.pool)
        self.states = StateManager(config, self.pool)
        self.evictor = Evictor(config, self.pool, self.paged, self.states, self.stats)
        self.pending: dict[bytes, int] = {}
        self._announcers: dict[bytes, int] = {}
        self.epoch = 0
        self._sequences: dict[int, Sequence] = {}
        self._pinned_pages: set[int] = set()

    # --- identity and lookup -------------------------------------------------------------

    def new_sequence(
        self,
        key: str,
        tokens: "array[int]",
        images: Iterable[tuple[int, int, bytes]] = (),
        salt: str = "",
        adapter: str = "",
        markers: Iterable[int] = (),
        digests: Iterable[bytes] = (),
    ) -> Sequence:
        """Name a prompt: copies its tokens and hashes its full units.

        Args:
            key: the request's id.
            tokens: packed int32.
            images: (offset, count, 32-byte key), ascending.
            salt: isolates tenants.
            adapter: isolates adapters.
            markers: message boundaries.
            digests: of the full units, if the caller has hashed them by the same rule.
        """
        sequence = Sequence(
            key=key,
            root=root_digest(self.namespace, self.config.unit_tokens, salt, adapter),
            tokens=array("i", tokens),
            prompt_length=len(tokens),
            images=tuple(ImageMark(*image) for image in images),
            markers=tuple(markers),
            digests=list(digests),
        )
        self._hash(sequence)
        return sequence

    def lookup(self, sequence: Sequence) -> Match:
        """What could be reused now. Pure: two in a row agree and nothing has changed."""
        return find_match(self.config, self.paged, self.states, sequence, self.pending)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether an empty cache could hold so many tokens and one live state."""
        rows = -(-num_tokens // self.config.page_tokens)
        if self.config.memory == "two_pools":
            return rows <= self.config.num_pages
        return rows + self.states.groups <= self.config.num_pages

    # --- admission -----------------------------------------------------------------------

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
        if admission is None and is_alone and match.checkpoint is not None:
            admission = self._take_over(sequence, match) or self._try_begin(
                sequence, _without_hit(match)
            )
        return admission

    def commit(self, admission: Admission) -> None:
        """The admission counts: ages, counters and targets are set."""
        sequence, match, stats = admission.sequence, admission.match, self.stats
        self.paged.touch(sequence.units[: match.hit // self.config.unit_tokens], self.epoch)
        if match.checkpoint is not None and match.hit:
            if match.checkpoint.digest in self.states.sealed:
                self.states.use(match.checkpoint, self.epoch)
            stats.restores += 1
        if admission.is_resumed:
            stats.resumed_queries += 1
        else:
            stats.queries += 1
            stats.prompt_tokens += match.num_tokens
            stats.matched_tokens += match.matched
            stats.hit_tokens += match.hit
            if match.gap:
                count(stats.gap_tokens, match.reason, match.gap)
        self._plan_targets(sequence, match)

    def rollback(self, admission: Admission) -> None:
        """Give every reservation of an uncommitted admission back."""
        sequence = admission.sequence
        self.end_restore(admission)
        self._drop_tables(sequence)
        self.states.free(sequence.live)
        self._reset(sequence)

    def end_restore(self, admission: Admission) -> None:
        """The copy into the live state was executed; the source is no longer read."""
        if admission.checkpoint is not None:
            self.states.unpin(admission.checkpoint)
            admission.checkpoint = None

    # --- running -------------------------------------------------------------------------

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make units for tokens 0..num_tokens; False, and nothing changed, if there is no room."""
        count_units = -(-num_tokens // self.config.unit_tokens) - len(sequence.units)
        if count_units <= 0:
            return True
        last = sequence.units[-1] if sequence.units else -1
        pages = self.paged.pages_for(sequence.open_page, last, count_units)
        if pages and not self.evictor.make_room(pages, 0):
            return False
        sequence.open_page = self.paged.grow(sequence.units, sequence.open_page, count_units)
        return True

    def reserve_export(
        self, sequence: Sequence, position: int, reason: StateClass
    ) -> tuple[int, ...]:
        """A slot for the state at a position, () if it is known already or there is none.

        An opportunistic one only ever takes a free slot.
        """
        place = position // self.config.unit_tokens - 1
        digests = sequence.digests
        if place < len(digests) and digests[place] in self.states.sealed:
            return ()
        groups = self.states.groups
        if reason == StateClass.OPPORTUNISTIC:
            has_room = self.pool.fits(0, groups)
        else:
            has_room = self.evictor.make_room(0, groups)
        pages = self.states.reserve(groups) if has_room else None
        if pages is None:
            self.stats.skipped_exports += 1
            return ()
        self.states.start_writing(pages)
        return pages

    def reserve_packed(self) -> tuple[int, ...]:
        """A slot for the INT8 form of an export, () if there is none."""
        groups = self.config.int8_groups
        pages = self.states.reserve(groups) if self.evictor.make_room(0, groups) else None
        if pages is None:
            self.stats.skipped_exports += 1
            return ()
        self.states.start_writing(pages)
        return pages

    def advance(self, sequence: Sequence, num_computed: int) -> None:
        """Rows and state of the first `num_computed` tokens exist now: publish full units."""
        assert num_computed <= len(sequence.tokens)
        self._hash(sequence)
        full = num_computed // self.config.unit_tokens
        if full > sequence.num_published:
            self.stats.duplicates += self.paged.publish(
                sequence.units, sequence.digests, sequence.num_published, full, self.epoch
            )
            sequence.num_published = full
            if not self.paged.is_open(sequence.open_page):
                sequence.open_page = -1
        sequence.num_computed = num_computed

    def settle(self, sequence: Sequence) -> None:
        """What was announced up to here was sealed or was not: nobody need wait for it."""
        passed = [p for p in sequence.announced if p <= sequence.num_computed]
        for position in passed:
            self._withdraw(sequence.announced.pop(position))

    def seal(
        self, sequence: Sequence, position: int, pages: tuple[int, ...], reason: StateClass
    ) -> bool:
        """A written state becomes visible; True if it did, False if one was there already.

        Raises:
            CacheError: if the position is not the end of a unit whose rows are published.
        """
        unit = self.config.unit_tokens
        place = position // unit
        if position % unit or not 0 < place <= sequence.num_published:
            raise CacheError(f"no checkpoint can stand at {position}")
        digest = sequence.digests[place - 1]
        checkpoint = Checkpoint(
            digest=digest,
            position=position,
            pages=pages,
            codec=self.config.codec,
            reason=reason,
            unit=sequence.units[place - 1],
            epoch=self.epoch,
            previous=self._previous(sequence, place - 1),
            successor=next(iter(sequence.digests[place : place + 1]), b""),
            number=0,
        )
        is_new = self.states.seal(checkpoint)
        if is_new:
            count(self.stats.exports, reason.name.lower())
            self.paged.lost_state.discard(checkpoint.unit)
            self._replace_rolling(sequence, checkpoint)
            if self.config.path_cap > 0:
                # After the step: what it restored from is locked until then.
                self.fence.after(lambda: self._trim_path(sequence, checkpoint))
        else:
            self.stats.refused_states += 1
        return is_new

    def cancel_export(self, pages: tuple[int, ...]) -> None:
        """A reserved slot was not written: it is freed and never seen."""
        self.stats.unwritten_exports += 1
        self.states.free(pages)

    def finish(self, sequence: Sequence, donate: StateClass | None = None) -> bool:
        """End a sequence: its rows stay in the index, its live state is freed or donated.

        Call it once no step can touch its pages.

        Args:
            sequence: admitted; may be partly computed.
            donate: keep the live state as a checkpoint of this class, if it stands on a unit
                and is of the stored form; the slot changes owner, nothing is copied.

        Returns:
            Whether the state was donated.
        """
        is_donated = False
        if donate is not None and self._can_donate(sequence):
            is_donated = self.seal(sequence, sequence.num_computed, sequence.live, donate)
            self.stats.donations += is_donated
        elif sequence.live:
            self.states.free(sequence.live)
        self.paged.touch(sequence.units[: sequence.num_published], self.epoch)
        self._drop_tables(sequence)
        self._reset(sequence)
        return is_donated

    # --- upkeep --------------------------------------------------------------------------

    def reset(self) -> bool:
        """Forget everything; refused (False, nothing changed) while anything runs or is pinned."""
        is_held = self._sequences or self.paged.num_referenced_pages()
        if is_held or not self.fence.is_idle or any(c.pins for c in self.states.sealed.values()):
            return False
        for checkpoint in list(self.states.sealed.values()):
            self.states.evict(checkpoint)
        while self.evictor.evict_oldest_leaf():
            pass
        self.paged.lost_state.clear()
        return True

    def compact(self) -> list[PageMove]:
        """Pack pages; those of an open transfer, or with a step in flight, stay put."""
        if not self.fence.is_idle:
            return []
        moves = self.pool.compact(self._is_movable)
        self.stats.moved_pages += len(moves)
        return moves

    def sequences(self) -> list[Sequence]:
        """Sequences that hold pages now."""
        return list(self._sequences.values())

    def pin_pages(self, pages: Iterable[int]) -> None:
        """Keep pages where they are: a transfer reads or writes them."""
        self._pinned_pages.update(pages)

    def unpin_pages(self, pages: Iterable[int]) -> None:
        """The transfer is over."""
        self._pinned_pages.difference_update(pages)

    def reclaimable_pages(self) -> int:
        """Free pages and pages of rows that nobody holds."""
        return self.pool.free_rows() + self.paged.num_idle_pages

    # --- private -------------------------------------------------------------------------

    def _hash(self, sequence: Sequence) -> None:
        extend_digests(
            sequence.digests,
            sequence.root,
            sequence.tokens,
            self.config.unit_tokens,
            sequence.images,
        )

    def _try_begin(self, sequence: Sequence, match: Match) -> Admission | None:
        assert not sequence.units
        assert not sequence.live
        unit, groups = self.config.unit_tokens, self.states.groups
        reused = [self.paged.index[d] for d in sequence.digests[: match.hit // unit]]
        fresh = -(-match.num_tokens // unit) - len(reused)
        last = reused[-1] if reused else -1
        self.paged.reference(reused)
        if match.checkpoint is not None:
            self.states.pin(match.checkpoint)
        rows = self.paged.pages_for(-1, last, fresh)
        if not self.evictor.make_room(rows, groups):
            if match.checkpoint is not None:
                self.states.unpin(match.checkpoint)
            self.paged.release(reused)
            return None
        self._fill(sequence, match, reused, fresh)
        live = self.states.reserve(groups)
        assert live is not None
        sequence.live = live
        source = match.checkpoint.pages if match.checkpoint else ()
        return Admission(sequence, match, source, match.checkpoint)

    def _take_over(self, sequence: Sequence, match: Match) -> Admission | None:
        """Admit with the checkpoint itself as the live state; for when no slot is left."""
        checkpoint = match.checkpoint
        if checkpoint is None or checkpoint.pins or checkpoint.codec != "raw":
            return None
        unit = self.config.unit_tokens
        reused = [self.paged.index[d] for d in sequence.digests[: match.hit // unit]]
        fresh = -(-match.num_tokens // unit) - len(reused)
        self.paged.reference(reused)
        self.states.pin(checkpoint)
        has_room = self.evictor.make_room(self.paged.pages_for(-1, reused[-1], fresh), 0)
        self.states.unpin(checkpoint)
        if not has_room:
            self.paged.release(reused)
            return None
        sequence.live = self.states.take_over(checkpoint)
        self.paged.lost_state.add(checkpoint.unit)
        self.stats.takeovers += 1
        self._fill(sequence, match, reused, fresh)
        return Admission(sequence, match, (), None)

    def _fill(self, sequence: Sequence, match: Match, reused: list[int], fresh: int) -> None:
        sequence.units = reused
        sequence.num_published = len(reused)
        sequence.open_page = self.paged.grow(sequence.units, -1, fresh)
        sequence.num_computed = match.hit
        sequence.target_length = match.num_tokens
        self._sequences[id(sequence)] = sequence

    def _plan_targets(self, sequence: Sequence, match: Match) -> None:
        spare = 0
        if self.config.retention.opportunistic:
            spare = self.pool.free_state_pages() // self.states.groups
        sequence.targets = prompt_targets(
            self.config,
            sequence.prompt_length,
            match.hit,
            match.junction,
            sequence.markers,
            spare,
        )
        for position in decode_targets(self.config, sequence.prompt_length, match.num_tokens):
            if position > match.hit:
                sequence.targets.setdefault(position, StateClass.GRID)
        self._announce(sequence)

    def _announce(self, sequence: Sequence) -> None:
        """Let others know what will be sealed, so that they may wait instead of computing it."""
        unit = self.config.unit_tokens
        for position, reason in sequence.targets.items():
            place = position // unit - 1
            if reason > StateClass.OPPORTUNISTIC and place < len(sequence.digests):
                digest = sequence.digests[place]
                sequence.announced[position] = digest
                self.pending[digest] = position
                self._announcers[digest] = self._announcers.get(digest, 0) + 1

    def _withdraw(self, digest: bytes) -> None:
        self._announcers[digest] -= 1
        if not self._announcers[digest]:
            del self._announcers[digest], self.pending[digest]

    def _previous(self, sequence: Sequence, units: int) -> int:
        if self.config.eviction != "marconi":
            return 0
        found = deepest(self.config, sequence.digests, self.states.sealed, units)
        return self.states.sealed[found].position if found else 0

    def _can_donate(self, sequence: Sequence) -> bool:
        position = sequence.num_computed
        return (
            bool(sequence.live)
            and position > 0
            and position % self.config.unit_tokens == 0
            and (self.config.partial_hits or position % self.config.grid == 0)
            and self.config.codec == "raw"
            and self.states.slots.get(sequence.live[0]) == SlotState.RESERVED
        )

    def _replace_rolling(self, sequence: Sequence, checkpoint: Checkpoint) -> None:
        position = checkpoint.position
        if position <= sequence.prompt_length or not is_rolling(self.config, position):
            return
        older = self.states.sealed.get(sequence.rolling)
        if older is not None and not older.pins and not older.hits:
            self.evictor.evict_state(older)
        sequence.rolling = checkpoint.digest

    def _trim_path(self, sequence: Sequence, newest: Checkpoint) -> None:
        """Keep at most `path_cap` states on this path: shallow ones go, forks and the tail stay."""
        path = [
            self.states.sealed[d] for d in filter(self.states.sealed.__contains__, sequence.digests)
        ]
        surplus = len(path) - self.config.path_cap
        for checkpoint in path[:-1]:
            if surplus <= 0:
                return
            is_exempt = (
                checkpoint is newest
                or checkpoint.pins
                or checkpoint.reason == StateClass.JUNCTION
                or self.paged.children[checkpoint.unit] > 1
            )
            if not is_exempt:
                self.evictor.evict_state(checkpoint)
                surplus -= 1

    def _drop_tables(self, sequence: Sequence) -> None:
        self.paged.close_page(sequence.open_page)
        self.paged.release(sequence.units)

    def _reset(self, sequence: Sequence) -> None:
        sequence.units = []
        sequence.live = ()
        sequence.open_page = -1
        sequence.num_published = 0
        sequence.num_computed = 0
        sequence.targets = {}
        for digest in sequence.announced.values():
            self._withdraw(digest)
        sequence.announced = {}
        sequence.rolling = b""
        self._sequences.pop(id(sequence), None)

    def _is_movable(self, page: int) -> bool:
        return self.fence.is_idle and page not in self._pinned_pages


def _without_hit(match: Match) -> Match:
    return Match(
        match.num_tokens, match.matched, 0, None, match.junction, match.gap + match.hit, "evicted"
    )
