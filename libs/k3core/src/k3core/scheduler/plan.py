"""What the scheduler decides for one step, what comes back, and what that means.

The engine turns a `StepPlan` into a forward pass: restores first, then the pass with its
exports, then encodes; it samples where logits are wanted and hands the results to `commit`.
"""

from array import array
from dataclasses import dataclass
from typing import Literal, TypeAlias

from k3core.cache.spec import Codec

EventKind: TypeAlias = Literal["prefilled", "token", "finished", "refused", "preempted"]


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy whole pages inside the arena.

    Attributes:
        src: pages read; for `int8` those of the compressed state when decoding.
        dst: pages written; for `int8` those of the compressed state when encoding.
        codec: `raw` copies page by page; `int8` converts between a raw state and its
            compressed form, the direction given by the list that holds this copy.
    """

    src: tuple[int, ...]
    dst: tuple[int, ...]
    codec: Codec = "raw"


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Copy one unit or one stored state between the arena and host memory.

    Attributes:
        host: names the bytes in host memory; the worker allocates them at the first copy out.
        unit: unit id in the arena, -1 for a state.
        pages: pages of a state in the arena, as it is stored (INT8 if `codec` says so); ()
            for a unit.
        codec: of a state copied in: `int8` is decoded into the live pages.
    """

    host: int
    unit: int = -1
    pages: tuple[int, ...] = ()
    codec: Codec = "raw"


@dataclass(frozen=True, slots=True)
class PlannedExport:
    """A checkpoint this row must write inside the pass.

    Attributes:
        position: tokens of the sequence that the state covers.
        offset: tokens of the chunk consumed when it is taken, 1..chunk length.
        pages: G reserved destination pages, one a KDA group.
    """

    position: int
    offset: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ImageNeed:
    """Rows of a chunk whose embedding comes from a picture.

    Attributes:
        index: which of the request's images.
        key: its feature key.
        image_offset: first row of the picture's embeddings that is wanted.
        chunk_offset: row of the chunk that it replaces.
        count: rows.
    """

    index: int
    key: bytes
    image_offset: int
    chunk_offset: int
    count: int


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One sequence's chunk.

    Attributes:
        start: tokens before the chunk; the row starts from zero state if and only if it is 0.
        token_ids: the chunk's known tokens, packed int32.
        num_drafts: tokens after them that the engine's drafter proposes; 0 without a drafter.
        is_decode: the chunk is the last sampled token and the drafts after it.
        wants_logits: the last token of the chunk is followed by sampling; with drafts, every
            token of the chunk.
        units: packed int32 unit ids of tokens 0..start + length.
        state_pages: G live state pages.
        exports: checkpoints to write inside the pass, ascending.
        images: embeddings this chunk reads.
    """

    request_id: str
    start: int
    token_ids: "array[int]"
    is_decode: bool
    wants_logits: bool
    units: "array[int]"
    state_pages: tuple[int, ...]
    exports: tuple[PlannedExport, ...] = ()
    images: tuple[ImageNeed, ...] = ()
    num_drafts: int = 0

    @property
    def length(self) -> int:
        """Tokens of the chunk, drafts included."""
        return len(self.token_ids) + self.num_drafts


@dataclass(frozen=True, slots=True)
class Event:
    """Something a caller must act on.

    Attributes:
        kind: `token`: `tokens` are new. `prefilled`: on a prefill worker, the first token is
            in `tokens` and pages are held until `release`. `finished`: nothing follows, pages
            are back. `refused`: it can never run, `reason` says why. `preempted`: it waits
            again; nothing to do.
    """

    kind: EventKind
    request_id: str
    tokens: tuple[int, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass.

    Attributes:
        step: ascending number of the plan; `commit` takes plans in this order.
        rows: decode rows first, then prefill chunks.
        restores: checkpoint into live pages, before the pass (codec: decode).
        encodes: raw exported pages into compressed ones, after the pass (codec: encode).
        spills: copies to host memory of what was evicted, before everything else.
        loads: copies from host memory, before the pass.
        moves: page moves of a compaction, before restores.
        freed_host: host bytes that may be freed after the spills.
        encode_images: pictures whose embeddings are not held and must be made for this step.
        dropped_images: feature keys whose embeddings the worker may forget now.
        events: of a plan without rows only, to be handled like those of `commit`, which brings
            them otherwise: a request that outgrew the cache and had to end.
    """

    step: int
    rows: tuple[RowPlan, ...] = ()
    restores: tuple[PageCopy, ...] = ()
    encodes: tuple[PageCopy, ...] = ()
    spills: tuple[HostCopy, ...] = ()
    loads: tuple[HostCopy, ...] = ()
    moves: tuple[PageCopy, ...] = ()
    freed_host: tuple[int, ...] = ()
    encode_images: tuple[bytes, ...] = ()
    dropped_images: tuple[bytes, ...] = ()
    events: tuple[Event, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the pass."""
        return sum(row.length for row in self.rows)


@dataclass(frozen=True, slots=True)
class RowResult:
    """What the engine reports of one row.

    Attributes:
        sampled: new tokens in order: none for a chunk without logits, one without drafts, one
            to drafts + 1 with them (accepted drafts, then the target's own token).
        exported: positions whose states were really written; sealed only if planned too.
        is_last: the sequence ended with these tokens (stop token, stop string).
    """

    request_id: str
    sampled: tuple[int, ...] = ()
    exported: tuple[int, ...] = ()
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class HandOff:
    """Pages of one finished prompt, pinned for one transfer.

    Attributes:
        job: whose pin holds the pages; `close_transfer(job)` lets go.
        num_tokens: tokens that the rows and the state cover.
        units: unit ids in order of tokens.
        state_pages: G pages of the state after `num_tokens`.
        first_token: sampled from the prompt, or -1 if none was asked for.
    """

    job: str
    request_id: str
    num_tokens: int
    units: tuple[int, ...]
    state_pages: tuple[int, ...]
    first_token: int = -1


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room on a decode worker for a prompt that is computed elsewhere.

    Attributes:
        num_tokens: prompt length.
        num_resident: leading tokens, a multiple of U, whose rows are here already: units
            before it need no transfer (and must not be written).
        units: unit ids of the whole prompt.
        state_pages: G pages to receive the state.
    """

    request_id: str
    num_tokens: int
    num_resident: int
    units: tuple[int, ...]
    state_pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """True counts of one request, fixed at its first admission.

    Attributes:
        prompt_tokens: cached_local + cached_remote + computed, always.
        checkpoint: position restored, or 0.
        matched: MLA coverage at lookup, tokens.
        reuse_gap: matched minus joint hit.
        gap_reason: why, or "".
    """

    prompt_tokens: int
    cached_local: int
    cached_remote: int
    computed: int
    checkpoint: int
    matched: int
    reuse_gap: int
    gap_reason: str
