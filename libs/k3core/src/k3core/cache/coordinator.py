"""One prefix cache over MLA units and KDA checkpoints: the only door to both.

A sequence enters with its tokens and identity. `lookup` says what could be reused and changes
nothing; `begin` reserves everything that running it takes, or nothing; `commit` makes the
admission count, `rollback` undoes it. While it runs, `grow`, `reserve_exports`, `advance` and
`seal` move it on; `finish` lets go. What must always hold: a hit is a sealed checkpoint on
exactly this prefix with all rows before it resident; a sealed checkpoint's bytes never change.
"""

from array import array
from collections.abc import Iterable

from k3core.cache.admission import Admission, Admitter
from k3core.cache.evictor import Evictor
from k3core.cache.fence import StepFence
from k3core.cache.hashing import ImageMark, extend_digests, root_digest
from k3core.cache.host_tier import HostTier, make_tier
from k3core.cache.match import Match, find_match
from k3core.cache.memory_plan import make_pool
from k3core.cache.native.chain import native_chain
from k3core.cache.page_pool import PageMove
from k3core.cache.paged_manager import PagedManager
from k3core.cache.positions import StateClass, decode_targets, prompt_targets
from k3core.cache.promises import Promises
from k3core.cache.sealing import Sealer
from k3core.cache.sequence import Sequence
from k3core.cache.spec import CacheConfig
from k3core.cache.state_manager import StateManager
from k3core.cache.stats import CacheStats, count


class PrefixCache:
    """The index, the pages and the checkpoints of one worker.

    Args:
        config: sizes and policies; checked here.
        namespace: identity of model, weights, dtype, layout and partition
            (`hashing.namespace_digest`); two caches share digests only if it is equal.
        tier: behind the arena, instead of one of `host_bytes`.

    Raises:
        CacheError: if the configuration contradicts itself.
    """

    def __init__(
        self, config: CacheConfig, namespace: bytes = b"", tier: HostTier | None = None
    ) -> None:
        config.check()
        # Compiled now if need be: a start may block, the first request may not.
        native_chain()
        self.config = config
        self.namespace = namespace
        self.fence = StepFence()
        self.stats = CacheStats()
        self.pool = make_pool(config, self._is_movable)
        self.paged = PagedManager(config, self.pool)
        self.states = StateManager(config, self.pool)
        self.tier = tier or (make_tier(config) if config.host_bytes else None)
        self.evictor = Evictor(config, self.pool, self.paged, self.states, self.stats, self.tier)
        self.promises = Promises(config.unit_tokens)
        self.epoch = 0
        self._sealer = Sealer(config, self.paged, self.states, self.evictor, self.fence, self.stats)
        self._admitter = Admitter(
            config, self.paged, self.states, self.evictor, self.stats, self.tier
        )
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
        return find_match(
            self.config, self.paged, self.states, sequence, self.promises.pending, self.tier
        )

    def resident_tokens(self, sequence: Sequence) -> int:
        """Leading tokens whose rows are in the arena, whether or not a state could use them."""
        return self.paged.match(sequence.digests) * self.config.unit_tokens

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
        return self._admitter.begin(sequence, match, is_alone)

    def commit(self, admission: Admission) -> None:
        """The admission counts: ages, counters and targets are set."""
        sequence, match, stats = admission.sequence, admission.match, self.stats
        self.paged.touch(sequence.units[: match.resident // self.config.unit_tokens], self.epoch)
        if match.checkpoint is not None and match.hit:
            if match.checkpoint.digest in self.states.sealed:
                self.states.use(match.checkpoint, self.epoch)
            stats.restores += 1
        if match.host_state is not None or match.host_units:
            stats.host_restores += 1
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

    def uncount(self, admission: Admission) -> None:
        """A counted admission came to nothing, because what it borrowed could not be read.

        It will be looked up and counted anew.
        """
        match, stats = admission.match, self.stats
        if admission.is_resumed:
            return
        stats.queries -= 1
        stats.prompt_tokens -= match.num_tokens
        stats.matched_tokens -= match.matched
        stats.hit_tokens -= match.hit
        if match.gap:
            count(stats.gap_tokens, match.reason, -match.gap)

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
        if self.tier is not None:
            self.tier.unpin(admission.borrowed)
            admission.borrowed = []

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
            dropped = self.paged.publish(
                sequence.units, sequence.digests, sequence.num_published, full, self.epoch
            )
            if dropped:
                del sequence.placed[sequence.num_published :]
            self.stats.duplicates += dropped
            sequence.num_published = full
            if not self.paged.is_open(sequence.open_page):
                sequence.open_page = -1
        sequence.num_computed = num_computed

    def settle(self, sequence: Sequence) -> None:
        """What was announced up to here was sealed or was not: nobody need wait for it."""
        self.promises.settle(sequence)

    def seal(
        self, sequence: Sequence, position: int, pages: tuple[int, ...], reason: StateClass
    ) -> bool:
        """A written state becomes visible; True if it did, False if one was there already.

        Raises:
            CacheError: if the position is not the end of a unit whose rows are published.
        """
        return self._sealer.seal(sequence, position, pages, reason, self.epoch)

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
        if donate is not None and self._sealer.can_donate(sequence):
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
        is_held = self._admitter.sequences or self.paged.num_referenced_pages()
        if is_held or not self.fence.is_idle or any(c.pins for c in self.states.sealed.values()):
            return False
        for checkpoint in list(self.states.sealed.values()):
            self.states.evict(checkpoint)
        while self.evictor.evict_oldest_leaf():
            pass
        self.paged.lost_state.clear()
        if self.tier is not None and not self.tier.is_remote:
            self.tier.clear()
        return True

    def compact(self) -> list[PageMove]:
        """Pack pages; those of an open transfer, or with a step in flight, stay put."""
        if not self.fence.is_idle:
            return []
        moves = self.pool.compact(self._is_movable)
        self.stats.moved_pages += len(moves)
        return moves

    def placed_units(self, sequence: Sequence, count: int) -> "array[int]":
        """The first `count` units of a table as the tensors know them: in places, not handles."""
        table, units = sequence.placed, sequence.units
        if sequence.placed_at != self.pool.num_moves():
            del table[:]
            sequence.placed_at = self.pool.num_moves()
        size, place = self.config.page_units, self.pool.place
        page, base = -1, 0
        for unit in units[len(table) : count]:
            if unit // size != page:
                page = unit // size
                base = (place(page) - page) * size
            table.append(unit + base)
        return table[:count]

    def sequences(self) -> list[Sequence]:
        """Sequences that hold pages now."""
        return list(self._admitter.sequences.values())

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
        if self.config.is_drop_strict:
            self._sealer.add_successors(sequence)
        for position in decode_targets(self.config, sequence.prompt_length, match.num_tokens):
            if position > match.hit:
                sequence.targets.setdefault(position, StateClass.GRID)
        self.promises.announce(sequence)

    def _drop_tables(self, sequence: Sequence) -> None:
        self.paged.close_page(sequence.open_page)
        self.paged.release(sequence.units)

    def _reset(self, sequence: Sequence) -> None:
        sequence.units = []
        del sequence.placed[:]
        sequence.live = ()
        sequence.open_page = -1
        sequence.num_published = 0
        sequence.num_computed = 0
        sequence.targets = {}
        self.promises.drop(sequence)
        sequence.rolling = b""
        self._admitter.sequences.pop(id(sequence), None)

    def _is_movable(self, page: int) -> bool:
        return self.fence.is_idle and page not in self._pinned_pages
