"""Cuts long transfers into native calls of bounded length, so that others get their turn."""

from collections.abc import Iterator, Sequence

from k3core.transfer.base import Write

MAX_CALL_BYTES = 64 * 1024 * 1024
"""Bytes of one native call."""


def write_batches(
    writes: Sequence[Write], max_bytes: int = MAX_CALL_BYTES
) -> Iterator[list[Write]]:
    """Cuts writes, also within one, into batches of at most so many bytes; empty ones vanish."""
    batch: list[Write] = []
    room = max_bytes
    for write in writes:
        done = 0
        while done < write.size_bytes:
            size = min(room, write.size_bytes - done)
            batch.append(Write(write.source + done, write.destination + done, size))
            done += size
            room -= size
            if not room:
                yield batch
                batch, room = [], max_bytes
    if batch:
        yield batch


def index_batches(sizes: Sequence[int], max_bytes: int = MAX_CALL_BYTES) -> Iterator[list[int]]:
    """Cuts things that stay whole into batches of at most so many bytes; a larger one is alone.

    Args:
        sizes: of the things, in bytes.
        max_bytes: of a batch.

    Returns:
        indices, in order.
    """
    batch: list[int] = []
    num_bytes = 0
    for index, size in enumerate(sizes):
        if batch and num_bytes + size > max_bytes:
            yield batch
            batch, num_bytes = [], 0
        batch.append(index)
        num_bytes += size
    if batch:
        yield batch
