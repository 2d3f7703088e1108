"""The words of one forward pass, shared by the engine, the cache and the model.

The engine fills a `ForwardBatch` from the scheduler's plan, takes `CacheViews` from the
cache's pools and hands both to the model. The model reads and writes through the views
and knows neither pages' owners nor policies. Nothing here allocates.

Letters: B sequences, T packed tokens, G KDA groups, P pages, U tokens a unit, H heads,
K key width, V value width, C latent width, R rotary width, D model width, M image rows.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StateExport:
    """One KDA checkpoint to be written inside the pass.

    Attributes:
        row: index of the sequence in the batch, 0..B-1.
        offset: tokens of this chunk consumed when the state is taken, 1..chunk length; each
            once a sequence.
        pages: destination page of each KDA group, G entries; never a live page of the batch.
    """

    row: int
    offset: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step over B packed chunks, one chunk a sequence.

    A sequence starts from zero state if and only if its context length is 0; its live state
    pages are read otherwise, and are overwritten with the state after the chunk in any case.
    MLA rows of the chunk are written to the units of its table before attention reads them.

    Attributes:
        token_ids: [T], int64, the model's device.
        query_starts: B + 1 host integers, ascending from 0 to T: chunk b is rows
            query_starts[b]..query_starts[b + 1].
        context_lengths: B host integers, tokens of the sequence before its chunk.
        unit_tables: [B, max_units], int32, CPU: unit j of sequence b holds its tokens
            j * U .. (j + 1) * U. Entries past the sequence's end are 0 and are not read.
        state_pages: [B, G], int32, CPU: live state page of each KDA group.
        logits_rows: R host integers, ascending: packed rows whose logits are wanted.
        exports: checkpoints to write inside the pass.
        image_rows: [M], int64, packed rows whose embedding is replaced, or None.
        image_embeds: [M, D], the replacing rows, in the model's dtype, or None.
    """

    token_ids: torch.Tensor
    query_starts: tuple[int, ...]
    context_lengths: tuple[int, ...]
    unit_tables: torch.Tensor
    state_pages: torch.Tensor
    logits_rows: tuple[int, ...]
    exports: tuple[StateExport, ...] = ()
    image_rows: torch.Tensor | None = None
    image_embeds: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class CacheViews:
    """Strided tensor views over one arena of equal pages; one page id space for both kinds.

    Unit id u lies in page u // page_units at place u % page_units.

    Attributes:
        unit_tokens: U, tokens a unit.
        page_units: units a page of MLA rows holds.
        latent: one view per MLA layer in layer order: [P, page_units, U, C + R], cache dtype;
            a row is the normed latent followed by the shared, unrotated key part.
        recurrent: one view per KDA layer in layer order: [P, H, V, K], float32 (V first).
        conv: one view per KDA layer: [P, W - 1, 3 * H * K], model dtype: the last W - 1 inputs
            of the convolution, oldest first, q | k | v side by side.
        group_of_layer: KDA group of each KDA layer, indexing the columns of `state_pages`.
    """

    unit_tokens: int
    page_units: int
    latent: tuple[torch.Tensor, ...]
    recurrent: tuple[torch.Tensor, ...]
    conv: tuple[torch.Tensor, ...]
    group_of_layer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """What a pass yields.

    Attributes:
        logits: [R, vocabulary], float32, in the order of `logits_rows`.
        taps: hidden rows asked for by a draft, by tap name; empty unless asked for.
    """

    logits: torch.Tensor
    taps: dict[str, torch.Tensor]
