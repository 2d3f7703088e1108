"""Plain host memory that other processes may write into, and spans allocated in it.

The prefill worker keeps image embeddings here while an encoder delivers them, and the engine
without a model keeps its pages here. The memory is mapped once, zeroed and never moves, so its
address can be registered with the data plane for the life of the worker.
"""

import mmap
from dataclasses import dataclass

import numpy as np

ALIGNMENT_BYTES = 64
"""Spans start at multiples of a cache line, which suits every dtype."""


class HostMemory:
    """One anonymous mapping; lives until the last view of it is gone."""

    def __init__(self, size_bytes: int) -> None:
        """Maps `size_bytes` zeroed bytes; pages of the system are taken as they are touched."""
        self._bytes = np.frombuffer(mmap.mmap(-1, size_bytes), dtype=np.uint8)

    @property
    def address(self) -> int:
        """Address of the first byte in this process."""
        return int(self._bytes.ctypes.data)

    @property
    def size_bytes(self) -> int:
        """Length of the mapping."""
        return self._bytes.size

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """A writable window; it keeps the mapping alive."""
        return self._bytes[offset : offset + size_bytes].data


@dataclass(frozen=True, slots=True)
class Span:
    """A run of bytes in a memory, owned by whoever allocated it until it is freed."""

    offset: int
    size_bytes: int


class SpanAllocator:
    """First fit over one memory; freed neighbours join again."""

    def __init__(self, size_bytes: int) -> None:
        """Starts with everything free."""
        self._size_bytes = size_bytes
        self._free: list[Span] = [Span(0, size_bytes)]
        self._used: set[Span] = set()

    @property
    def used_bytes(self) -> int:
        """Bytes allocated now, rounding included."""
        return sum(span.size_bytes for span in self._used)

    @property
    def size_bytes(self) -> int:
        """Bytes in all."""
        return self._size_bytes

    def allocate(self, size_bytes: int) -> Span | None:
        """Takes a span of at least `size_bytes`, or None where no gap is long enough."""
        rounded = -(-max(size_bytes, 1) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        for index, gap in enumerate(self._free):
            if gap.size_bytes < rounded:
                continue
            rest = Span(gap.offset + rounded, gap.size_bytes - rounded)
            self._free[index : index + 1] = [rest] if rest.size_bytes else []
            span = Span(gap.offset, rounded)
            self._used.add(span)
            return span
        return None

    def free(self, span: Span) -> None:
        """Gives a span back; one that is not out is a fault of ours."""
        assert span in self._used, "span freed twice or never allocated"
        self._used.remove(span)
        joined: list[Span] = []
        for gap in sorted([*self._free, span], key=lambda gap: gap.offset):
            if joined and joined[-1].offset + joined[-1].size_bytes == gap.offset:
                last = joined.pop()
                gap = Span(last.offset, last.size_bytes + gap.size_bytes)
            joined.append(gap)
        self._free = joined
