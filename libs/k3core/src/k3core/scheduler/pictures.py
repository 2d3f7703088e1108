"""Pictures of a request: how far it may go without them, and who holds their embeddings."""

from k3core.scheduler.embeddings import EmbeddingCache
from k3core.scheduler.entry import Entry
from k3core.scheduler.plan import ImageNeed


class Pictures:
    """Rules over one embedding cache, or over none.

    Args:
        embeddings: None where room for embeddings is not this scheduler's concern.
        waits: a chunk stops before a picture that has not arrived.
    """

    def __init__(self, embeddings: EmbeddingCache | None, waits: bool) -> None:
        self._embeddings = embeddings
        self._waits = waits

    def drain_dropped(self) -> tuple[bytes, ...]:
        """Keys whose embeddings may be forgotten, since the last call."""
        return self._embeddings.drain_dropped() if self._embeddings is not None else ()

    def limit(self, entry: Entry, start: int, end: int) -> int:
        """How far a chunk may go before a picture that cannot be had now."""
        if not self._waits and self._embeddings is None:
            return end
        for index, image in enumerate(entry.request.images):
            if image.offset >= end:
                break
            if image.offset + image.count <= start:
                continue
            if self._waits and index not in entry.ready_images:
                return max(start, image.offset)
            if self._embeddings is not None and index not in entry.acquired_images:
                if not self._embeddings.can_acquire(image.key, image.count):
                    return max(start, image.offset)
                # Acquired one after the other, so that each sees the room the others left.
                return self._limit_from(entry, index, end)
        return end

    def acquire(self, entry: Entry, start: int, end: int) -> list[bytes]:
        """Refer to every picture of a chunk; keys of those whose embeddings must be made."""
        embeddings = self._embeddings
        if embeddings is None:
            return []
        missing: list[bytes] = []
        wanted = [
            (index, image)
            for index, image in enumerate(entry.request.images)
            if image.offset < end
            and image.offset + image.count > start
            and index not in entry.acquired_images
        ]
        # Those that are held first, so that making room for the others cannot drop them.
        wanted.sort(key=lambda each: not embeddings.holds(each[1].key, each[1].count))
        for index, image in wanted:
            entry.acquired_images.add(index)
            if embeddings.acquire(image.key, image.count):
                missing.append(image.key)
        return missing

    def release(self, entry: Entry, computed: int) -> None:
        """Let go of the pictures that end before `computed` tokens."""
        if self._embeddings is None:
            return
        for index in sorted(entry.acquired_images):
            image = entry.request.images[index]
            if image.offset + image.count <= computed:
                self._embeddings.release(image.key)
                entry.acquired_images.remove(index)

    def _limit_from(self, entry: Entry, first: int, end: int) -> int:
        embeddings = self._embeddings
        assert embeddings is not None
        room = embeddings.free + embeddings.num_idle_tokens
        counted: set[bytes] = set()
        for index in range(first, len(entry.request.images)):
            image = entry.request.images[index]
            if image.offset >= end:
                break
            if self._waits and index not in entry.ready_images:
                return image.offset
            if index in entry.acquired_images or image.key in counted:
                continue
            counted.add(image.key)
            if embeddings.holds(image.key, image.count):
                room -= image.count if embeddings.is_idle(image.key) else 0
            else:
                room -= image.count
            if room < 0:
                return image.offset
        return end


def needs(entry: Entry, start: int, end: int) -> tuple[ImageNeed, ...]:
    """Embedding rows that tokens start..end of a request read."""
    found: list[ImageNeed] = []
    for index, image in enumerate(entry.request.images):
        first, last = max(start, image.offset), min(end, image.offset + image.count)
        if first < last:
            found.append(
                ImageNeed(index, image.key, first - image.offset, first - start, last - first)
            )
    return tuple(found)
