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
# depends on the chunk alone, never on the rest of the batch.
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
class PassPlans:
    """Plans of one pass.

    Attributes:
        kda: one plan per KDA group.
        is_kda_decode: every chunk is one token and nothing is exported.
        units: [T] int64, the unit that each packed token's MLA row is written to.
        places: [T] int64, its place within the unit.
        mla: the batch split by form, one or two parts.
    """

    kda: tuple[KdaPlan, ...]
    is_kda_decode: bool
    units: torch.Tensor
    places: torch.Tensor
    mla: tuple[MlaPart, ...]


def plan_pass(batch: ForwardBatch, views: CacheViews, form: MlaForm) -> PassPlans:
    """Build the plans of a pass; the batch must hold at least one token a sequence."""
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
        mla=_plan_mla(batch, lengths, form),
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


def _plan_mla(batch: ForwardBatch, lengths: list[int], form: MlaForm) -> tuple[MlaPart, ...]:
    if form == "auto":
        absorbed = [length <= ABSORBED_MAX_TOKENS for length in lengths]
    else:
        absorbed = [form == "absorbed"] * len(lengths)
    tables = batch.unit_tables.long().to(batch.token_ids.device)
    if len(set(absorbed)) == 1:
        plan = MlaPlan(
            starts=batch.query_starts, contexts=batch.context_lengths, unit_tables=tables
        )
        return (MlaPart(is_absorbed=absorbed[0], rows=None, plan=plan),)
    return tuple(
        _plan_part(
            batch, lengths, tables, [i for i, a in enumerate(absorbed) if a == wanted], wanted
        )
        for wanted in (False, True)
    )


def _plan_part(
    batch: ForwardBatch,
    lengths: list[int],
    tables: torch.Tensor,
    sequences: list[int],
    is_absorbed: bool,
) -> MlaPart:
    starts = [0]
    for sequence in sequences:
        starts.append(starts[-1] + lengths[sequence])
    rows = torch.cat(
        [torch.arange(batch.query_starts[i], batch.query_starts[i + 1]) for i in sequences]
    )
    plan = MlaPlan(
        starts=tuple(starts),
        contexts=tuple(batch.context_lengths[i] for i in sequences),
        unit_tables=tables[sequences],
    )
    return MlaPart(is_absorbed=is_absorbed, rows=rows.to(batch.token_ids.device), plan=plan)
