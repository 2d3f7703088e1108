"""Turning one `ForwardBatch` into what the operators of every layer read.

Built once a pass on the host, then shared by all layers: convolution and recurrence plans for
each KDA group, write places and attention plans for MLA.

Letters: B sequences, T packed tokens, G KDA groups, U tokens a unit.
"""

import itertools
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from k3core.batch import CacheViews, ForwardBatch
from k3core.kernels.interface import KdaPlan, MlaPlan

# auto: a chunk of at most ABSORBED_MAX_TOKENS is absorbed, a longer one expanded. The form
# depends on the chunk alone, never on the rest of the batch. In the last layer, where only wanted
# rows attend, each run of such rows counts as a chunk.
MlaForm: TypeAlias = Literal["auto", "expanded", "absorbed"]

# Absorbing trades K + V for 2 * C a cached row and query head, and saves building keys and
# values of the whole context: it wins for the few rows of a decode or a verified draft.
ABSORBED_MAX_TOKENS = 8


@dataclass(frozen=True, slots=True)
class MlaPart:
    """Chunks of a batch that attend in one form.

    Attributes:
        is_absorbed: which form.
        rows: [t] int64 packed rows of these chunks, or None for all rows of the batch.
        plan: of these chunks, with starts counted within `rows`.
    """

    is_absorbed: bool
    rows: torch.Tensor | None
    plan: MlaPlan


@dataclass(frozen=True, slots=True)
class LastReads:
    """The rows that are still read after the last layer, where they are not all.

    Attributes:
        rows: [R] int64 packed rows, ascending; none of a prompt's inner chunk.
        mla: how they attend, with starts counted within `rows`; no part if there is no row.
    """

    rows: torch.Tensor
    mla: tuple[MlaPart, ...]


@dataclass(frozen=True, slots=True)
class PassPlans:
    """Plans of one pass.

    Attributes:
        kda: one plan per KDA group.
        is_kda_decode: every chunk is one token and nothing is exported.
        units: [T] int64, the unit that each packed token's MLA row is written to.
        places: [T] int64, its place within the unit.
        mla: the batch split by form, one or two parts.
        last: what the last layer may confine itself to once it has written its cache, or None.
    """

    kda: tuple[KdaPlan, ...]
    is_kda_decode: bool
    units: torch.Tensor
    places: torch.Tensor
    mla: tuple[MlaPart, ...]
    last: LastReads | None


def plan_pass(
    batch: ForwardBatch, views: CacheViews, form: MlaForm, *, reads_all: bool = False
) -> PassPlans:
    """Build the plans of a pass; the batch must hold at least one token a sequence.

    Args:
        batch: the step.
        views: of the cache.
        form: of MLA layers.
        reads_all: every row is read after the last layer, whatever logits are wanted.
    """
    starts = batch.query_starts
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    assert len(lengths) == len(batch.context_lengths), "one chunk a sequence"
    assert lengths, "a pass needs a sequence"
    assert min(lengths) > 0, "a chunk is never empty"
    device = batch.token_ids.device
    units, places = _write_places(batch, views.unit_tokens, lengths)
    return PassPlans(
        kda=_plan_kda(batch, device),
        is_kda_decode=max(lengths) == 1 and not batch.exports,
        units=units.to(device),
        places=places.to(device),
        mla=_plan_mla(batch, _chunks(batch, lengths), form),
        last=None if reads_all else _plan_last(batch, form),
    )


def _write_places(
    batch: ForwardBatch, unit_tokens: int, lengths: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit and place of each packed token, on the host."""
    sequences = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    shift = torch.tensor(batch.context_lengths) - torch.tensor(batch.query_starts[:-1])
    positions = torch.arange(len(sequences)) + shift[sequences]
    columns = torch.div(positions, unit_tokens, rounding_mode="floor")
    return batch.unit_tables[sequences, columns].long(), positions % unit_tokens


def _plan_kda(batch: ForwardBatch, device: torch.device) -> tuple[KdaPlan, ...]:
    has_state = tuple(context > 0 for context in batch.context_lengths)
    state_mask = torch.tensor(has_state, device=device)
    exports = sorted(batch.exports, key=lambda export: (export.row, export.offset))
    page_rows = batch.state_pages.tolist()
    return tuple(
        KdaPlan(
            starts=batch.query_starts,
            has_state=has_state,
            pages=tuple(pages[group] for pages in page_rows),
            page_ids=batch.state_pages[:, group].long().to(device),
            state_mask=state_mask,
            exports=tuple((e.row, e.offset, e.pages[group]) for e in exports),
        )
        for group in range(batch.state_pages.shape[1])
    )


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Consecutive query rows of one sequence.

    Attributes:
        rows: packed.
        context: tokens of the sequence before them.
        sequence: its number in the batch.
    """

    rows: range
    context: int
    sequence: int


def _chunks(batch: ForwardBatch, lengths: list[int]) -> list[_Chunk]:
    return [
        _Chunk(range(start, start + length), context, sequence)
        for sequence, (start, length, context) in enumerate(
            zip(batch.query_starts, lengths, batch.context_lengths, strict=False)
        )
    ]


def _plan_last(batch: ForwardBatch, form: MlaForm) -> LastReads | None:
    wanted = batch.logits_rows
    if len(wanted) == len(batch.token_ids):
        return None
    device = batch.token_ids.device
    runs: list[_Chunk] = []
    sequence = 0
    for row in wanted:
        while row >= batch.query_starts[sequence + 1]:
            sequence += 1
        start = batch.query_starts[sequence]
        last = runs[-1].rows if runs else range(0)
        if last and last.stop == row > start:
            runs[-1] = _Chunk(range(last.start, row + 1), runs[-1].context, sequence)
            continue
        context = batch.context_lengths[sequence] + row - start
        runs.append(_Chunk(range(row, row + 1), context, sequence))
    rows = torch.tensor(wanted, dtype=torch.int64, device=device)
    return LastReads(rows, _plan_mla(batch, runs, form) if runs else ())


def _plan_mla(batch: ForwardBatch, chunks: list[_Chunk], form: MlaForm) -> tuple[MlaPart, ...]:
    """Plans of chunks; their rows are counted within all rows of these chunks."""
    forms = [
        form == "absorbed" if form != "auto" else len(chunk.rows) <= ABSORBED_MAX_TOKENS
        for chunk in chunks
    ]
    starts = [0, *itertools.accumulate(len(chunk.rows) for chunk in chunks)]
    if len(set(forms)) == 1:
        return (MlaPart(forms[0], None, _plan_part(batch, chunks)),)
    parts: list[MlaPart] = []
    for is_absorbed in (False, True):
        chosen = [i for i, absorbed in enumerate(forms) if absorbed == is_absorbed]
        rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in chosen])
        plan = _plan_part(batch, [chunks[i] for i in chosen])
        parts.append(MlaPart(is_absorbed, rows.to(batch.token_ids.device), plan))
    return tuple(parts)


def _plan_part(batch: ForwardBatch, chunks: list[_Chunk]) -> MlaPlan:
    tables = batch.unit_tables[[chunk.sequence for chunk in chunks]]
    return MlaPlan(
        starts=(0, *itertools.accumulate(len(chunk.rows) for chunk in chunks)),
        contexts=tuple(chunk.context for chunk in chunks),
        unit_tables=tables.long().to(batch.token_ids.device),
    )
