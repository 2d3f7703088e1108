"""Builds the rows of one step: chunks, their exports, the pictures they read.

Reservations are made in page handles while the step is put together; places are looked up
last, because making room may still have moved pages.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from k3core.cache.admission import Admission
from k3core.cache.coordinator import PrefixCache
from k3core.cache.positions import StateClass, decode_targets, next_chunk
from k3core.scheduler.entry import Entry
from k3core.scheduler.pictures import Pictures, needs
from k3core.scheduler.plan import Event, HostCopy, PageCopy, PlannedExport, RowPlan, StepPlan


@dataclass(slots=True)
class DraftRow:
    """A row being planned; pages are handles."""

    entry: Entry
    start: int
    end: int
    num_drafts: int
    is_decode: bool
    wants_logits: bool


@dataclass(slots=True)
class DraftStep:
    """A step being planned."""

    rows: list[DraftRow] = field(default_factory=list[DraftRow])
    admissions: list[Admission] = field(default_factory=list[Admission])
    encode_images: list[bytes] = field(default_factory=list[bytes])


class StepPlanner:
    """Turns an entry and a budget into a row, reserving what the row takes."""

    def __init__(
        self,
        cache: PrefixCache,
        pictures: Pictures,
        holds_after_prompt: bool,
    ) -> None:
        self._cache = cache
        self._pictures = pictures
        self._holds_after_prompt = holds_after_prompt

    def add_decode(self, step: DraftStep, entry: Entry, num_drafts: int) -> None:
        """Plan one decode row; its table has grown already."""
        sequence = entry.sequence
        start = sequence.num_computed
        end = start + 1 + num_drafts
        for position in decode_targets(self._cache.config, start, end):
            self._export(entry, start, position, StateClass.GRID)
        step.rows.append(DraftRow(entry, start, end, num_drafts, True, True))

    def add_chunk(self, step: DraftStep, entry: Entry, budget: int) -> int:
        """Plan the next chunk of a prompt.

        Returns:
            Tokens planned; 0 if a picture it needs is not to be had yet.
        """
        cache, sequence = self._cache, entry.sequence
        start, n = sequence.num_computed, sequence.target_length
        chunk = next_chunk(cache.config, start, budget, n, sequence.targets)
        limit = self._pictures.limit(entry, start, chunk.end)
        if limit < chunk.end:
            floor = limit - limit % cache.config.unit_tokens
            # For one that is on its way a chunk waits with a whole unit behind it. Room may not come
            # before what lies in this very unit is computed: then the chunk ends inside the unit.
            if floor > start or self._pictures.is_on_its_way(entry, limit):
                limit = floor
            if limit <= start:
                return 0
            chunk = next_chunk(cache.config, start, limit - start, n, sequence.targets)
        step.encode_images += self._pictures.acquire(entry, start, chunk.end)
        is_last = chunk.end == n
        wants = is_last and entry.num_generated < entry.request.max_new_tokens
        reasons = {p: sequence.targets.get(p, StateClass.ENDPOINT) for p in chunk.exports}
        # Slots may not suffice for all: what the next prompt will want most is asked for first.
        for position in sorted(reasons, key=lambda p: (reasons[p], p), reverse=True):
            if position < n or not self._will_donate(entry):
                self._export(entry, start, position, reasons[position])
        entry.exports.sort(key=lambda each: each[0].position)
        step.rows.append(DraftRow(entry, start, chunk.end, 0, False, wants))
        return chunk.end - start

    def build(self, number: int, step: DraftStep, events: tuple[Event, ...] = ()) -> StepPlan:
        """The finished plan, in places instead of handles."""
        cache = self._cache
        codec = cache.config.codec
        moves = tuple(PageCopy((m.src,), (m.dst,)) for m in cache.pool.drain_moves())
        restores = tuple(
            PageCopy(self._places(a.source), self._places(a.sequence.live), codec)
            for a in step.admissions
            if a.source
        )
        encodes = tuple(
            PageCopy(self._places(export.pages), self._places(packed), "int8")
            for row in step.rows
            for export, packed in row.entry.exports
            if packed
        )
        return StepPlan(
            step=number,
            rows=tuple(self._row(row) for row in step.rows),
            restores=restores,
            encodes=encodes,
            spills=self._spills(),
            loads=tuple(load for a in step.admissions for load in self._loads(a)),
            moves=moves,
            freed_host=tuple(cache.tier.drain_drops()) if cache.tier is not None else (),
            encode_images=tuple(step.encode_images),
            dropped_images=self._pictures.drain_dropped(),
            events=events,
        )

    def _spills(self) -> tuple[HostCopy, ...]:
        tier = self._cache.tier
        if tier is None:
            return ()
        return tuple(HostCopy(each.host, each.unit, each.pages) for each in tier.drain_spills())

    def _loads(self, admission: Admission) -> list[HostCopy]:
        match, sequence, cache = admission.match, admission.sequence, self._cache
        if not admission.borrowed:
            return []
        first = match.resident // cache.config.unit_tokens
        placed = cache.placed_units(sequence, first + len(match.host_units))[first:]
        loads = [
            HostCopy(entry.host, unit=unit)
            for entry, unit in zip(match.host_units, placed, strict=True)
        ]
        if match.host_state is not None:
            live = self._places(sequence.live)
            loads.append(HostCopy(match.host_state.host, pages=live, codec=cache.config.codec))
        return loads

    def _row(self, row: DraftRow) -> RowPlan:
        entry, sequence = row.entry, row.entry.sequence
        covered = -(-row.end // self._cache.config.unit_tokens)
        known = row.end - row.num_drafts
        return RowPlan(
            request_id=entry.request.request_id,
            start=row.start,
            token_ids=sequence.tokens[row.start : known],
            is_decode=row.is_decode,
            wants_logits=row.wants_logits,
            units=self._cache.placed_units(sequence, covered),
            state_pages=self._places(sequence.live),
            exports=tuple(
                PlannedExport(e.position, e.offset, self._places(e.pages)) for e, _ in entry.exports
            ),
            images=needs(entry, row.start, known),
            num_drafts=row.num_drafts,
        )

    def _export(self, entry: Entry, start: int, position: int, reason: StateClass) -> None:
        cache = self._cache
        pages = cache.reserve_export(entry.sequence, position, reason)
        if not pages:
            return
        packed: tuple[int, ...] = ()
        if cache.config.codec == "int8":
            packed = cache.reserve_packed()
            if not packed:
                cache.cancel_export(pages)
                return
        entry.sequence.targets.setdefault(position, reason)
        entry.exports.append((PlannedExport(position, position - start, pages), packed))

    def _will_donate(self, entry: Entry) -> bool:
        """Whether the row's final state becomes the checkpoint itself, without a copy."""
        if self._cache.config.codec != "raw":
            return False
        is_end = entry.num_generated + 1 >= entry.request.max_new_tokens
        return self._holds_after_prompt or is_end

    def _places(self, pages: Items[int]) -> tuple[int, ...]:
        return tuple(map(self._cache.pool.place, pages))
