"""A hand-off in the words of the wire: layouts compared, grants made, pages turned into writes.

Both ends use the same arithmetic: the decode worker grants units and state pages of its arena,
the prefill worker pairs them with its own and writes spans. What moves is never looked at.
"""

import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from k3core.cache.layout import PageLayout, Span, spans
from k3core.transfer.base import Write
from k3wire.errors import Overloaded
from k3wire.messages.pages import PageGrant, PageLayoutInfo

WHOLE_MODEL = "tp0of1"
"""Partition of a worker that holds every head."""


def layout_info(
    layout: PageLayout, model_fingerprint: str, partition: str = WHOLE_MODEL
) -> PageLayoutInfo:
    """What a worker says of its pages."""
    return PageLayoutInfo(
        model_fingerprint=model_fingerprint,
        layout_version=layout.version,
        partition=partition,
        page_bytes=layout.page_bytes,
        page_units=layout.page_units,
        unit_tokens=layout.unit_tokens,
        num_state_groups=layout.num_groups,
    )


def check_layouts(ours: PageLayoutInfo, theirs: PageLayoutInfo) -> None:
    """Compares two workers' layouts.

    Raises:
        Overloaded: they differ, so these two can serve nothing together; names both values.
    """
    for name in ours.__struct_fields__:
        here, there = getattr(ours, name), getattr(theirs, name)
        if here != there:
            raise Overloaded(
                f"Prefill and decode workers disagree on {name}: {there!r} and {here!r}."
            )


@dataclass(frozen=True, slots=True)
class Arena:
    """Where a worker's pages lie for its peers.

    Attributes:
        session: transfer-engine session.
        base_address: first byte of page 0.
        layout: of every page.
    """

    session: str
    base_address: int
    layout: PageLayout


def make_grant(
    arena: Arena, units: Sequence[int], state_pages: Sequence[int], num_resident_tokens: int
) -> PageGrant:
    """Tells a prefill worker where a prompt may be written.

    Args:
        arena: of this decode worker.
        units: unit ids of the whole prompt.
        state_pages: one for each KDA group.
        num_resident_tokens: leading tokens, whole units, that are here already.
    """
    first = num_resident_tokens // arena.layout.unit_tokens
    return PageGrant(
        session=arena.session,
        base_address=arena.base_address,
        latent_units=pack_ids(units[first:]),
        state_pages=pack_ids(state_pages),
        num_resident_tokens=num_resident_tokens,
    )


def unit_writes(arena: Arena, grant: PageGrant, units: Sequence[int], position: int) -> list[Write]:
    """Writes that carry some of a prompt's units.

    Args:
        arena: of this prefill worker.
        grant: destinations.
        units: unit ids here, of consecutive tokens.
        position: token that the first of them starts with, a multiple of the unit.

    Returns:
        The writes; units that are resident there already are left out.
    """
    granted = unpack_ids(grant.latent_units)
    unit_tokens = arena.layout.unit_tokens
    first = position // unit_tokens - grant.num_resident_tokens // unit_tokens
    wanted = units[max(0, -first) :]
    start = max(0, first)
    destinations = granted[start : start + len(wanted)]
    assert len(destinations) == len(wanted), "more units than were granted"
    return _writes(arena, grant, spans(arena.layout, wanted, destinations))


def state_writes(arena: Arena, grant: PageGrant, state_pages: Sequence[int]) -> list[Write]:
    """Writes that carry one whole KDA state."""
    destinations = unpack_ids(grant.state_pages)
    return _writes(arena, grant, spans(arena.layout, (), (), state_pages, destinations))


def checksum(pages: Iterable[memoryview]) -> int:
    """`zlib.crc32` over some pages, one after the other."""
    value = 0
    for page in pages:
        value = zlib.crc32(page, value)
    return value


def pack_ids(ids: Iterable[int]) -> bytes:
    """Ids to little-endian int32."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> "array[int]":
    """Little-endian int32 to ids."""
    ids = array("i")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def _writes(arena: Arena, grant: PageGrant, moves: Iterable[Span]) -> list[Write]:
    here, there = arena.base_address, grant.base_address
    return [Write(here + move.src, there + move.dst, move.length) for move in moves]
