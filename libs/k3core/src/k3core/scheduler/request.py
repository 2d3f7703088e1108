"""What the scheduler is given: one request, as prompt tokens and the identity of its images."""

from array import array
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """A run of placeholder tokens bound to one picture.

    Attributes:
        offset: first placeholder, in tokens from the prompt's start.
        count: placeholders, all contiguous.
        key: 32 bytes, the content's feature key.
    """

    offset: int
    count: int
    key: bytes


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to run.

    Attributes:
        request_id: unique among live requests.
        tokens: prompt ids, packed int32; never changed by the scheduler, which copies it.
        max_new_tokens: tokens to generate; 0 computes the prompt and stops.
        images: in ascending offsets, not overlapping.
        salt: isolates tenants; equal salts share.
        adapter: name of the adapter whose weights are applied; "" for none.
        markers: positions of message boundaries, for marker promotion.
        draft_tokens: drafts verified with each decode step; 0 without a drafter.
        unit_digests: of the prompt's full units, if they were hashed before by the same rule
            with the same namespace, salt and adapter; () to hash here.
    """

    request_id: str
    tokens: "array[int]"
    max_new_tokens: int = 1
    images: tuple[ImageSpan, ...] = ()
    salt: str = ""
    adapter: str = ""
    markers: tuple[int, ...] = ()
    draft_tokens: int = 0
    unit_digests: tuple[bytes, ...] = ()
