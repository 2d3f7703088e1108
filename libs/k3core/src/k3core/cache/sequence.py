"""One request as the cache sees it: its identity, its units, its live state."""

from array import array
from dataclasses import dataclass, field

from k3core.cache.hashing import ImageMark
from k3core.cache.positions import StateClass


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable; owned by the scheduler's thread, changed by the cache alone.

    Attributes:
        key: the request's id.
        root: parent of the first unit's digest.
        tokens: prompt, then generated tokens, packed int32.
        prompt_length: n, of the prompt as submitted.
        images: placeholders bound to pictures.
        markers: message boundaries.
        digests: of the full units of `tokens`, as far as hashed.
        units: unit id of each unit that holds or will hold rows, in order.
        num_computed: tokens whose rows and state exist.
        num_published: units of `units` that are in the index (its own or a canonical one).
        live: pages of the live state, () before admission.
        open_page: page of rows that this sequence is filling, -1 for none.
        targets: checkpoint positions still wanted, with their class.
        announced: digests of checkpoints this sequence is going to seal, by position.
        rolling: digest of the newest rolling decode checkpoint, to be replaced by the next.
        placed: `units` as the tensors know them, as far as looked up.
        placed_at: number of page moves when `placed` was true.
        draft_tokens: drafts verified a decode step.
        target_length: tokens that admission must compute before decoding goes on.
    """

    key: str
    root: bytes
    tokens: "array[int]"
    prompt_length: int
    images: tuple[ImageMark, ...] = ()
    markers: tuple[int, ...] = ()
    digests: list[bytes] = field(default_factory=list[bytes])
    units: list[int] = field(default_factory=list[int])
    num_computed: int = 0
    num_published: int = 0
    live: tuple[int, ...] = ()
    open_page: int = -1
    targets: dict[int, StateClass] = field(default_factory=dict[int, StateClass])
    announced: dict[int, bytes] = field(default_factory=dict[int, bytes])
    rolling: bytes = b""
    placed: "array[int]" = field(default_factory=lambda: array("i"))
    placed_at: int = 0
    draft_tokens: int = 0
    target_length: int = 0
