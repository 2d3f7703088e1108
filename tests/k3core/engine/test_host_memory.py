import ctypes
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3core.engine.host_memory import ALIGNMENT_BYTES, HostMemory, Span, SpanAllocator


def test_a_view_shows_the_bytes_at_the_registered_address() -> None:
    memory = HostMemory(4096)
    memory.view(128, 4)[:] = b"abcd"
    assert ctypes.string_at(memory.address + 128, 4) == b"abcd"
    ctypes.memmove(memory.address, b"xy", 2)
    assert bytes(memory.view(0, 3)) == b"xy\0"


def test_a_full_allocator_says_none_and_serves_again_after_a_free() -> None:
    allocator = SpanAllocator(4 * ALIGNMENT_BYTES)
    spans = [allocator.allocate(ALIGNMENT_BYTES) for _ in range(4)]
    assert allocator.allocate(1) is None
    assert spans[1] is not None
    allocator.free(spans[1])
    assert allocator.allocate(1) == spans[1]


def test_freeing_twice_is_a_fault() -> None:
    allocator = SpanAllocator(1024)
    span = allocator.allocate(10)
    assert span is not None
    allocator.free(span)
    with pytest.raises(AssertionError):
        allocator.free(span)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 700)), max_size=60))
def test_spans_never_overlap_and_everything_comes_back(moves: list[tuple[bool, int]]) -> None:
    allocator = SpanAllocator(4096)
    held: list[Span] = []
    for wants, number in moves:
        if wants:
            span = allocator.allocate(number)
            if span is not None:
                held.append(span)
        elif held:
            allocator.free(held.pop(number % len(held)))
        ordered = sorted(held, key=lambda span: span.offset)
        for left, right in itertools.pairwise(ordered):
            assert left.offset + left.size_bytes <= right.offset
        assert allocator.used_bytes == sum(span.size_bytes for span in held)
    for span in held:
        allocator.free(span)
    assert allocator.allocate(4096) == Span(0, 4096)
