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
        # Requests that will come to a picture again, the first to say so first. That one alone
        # may drop awaited pictures: so it always goes on, and the others after it.
        self._awaiting: list[Entry] = []

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
                takes = self._takes_awaited(entry)
                if not self._embeddings.can_acquire(image.key, image.count, takes):
                    return max(start, image.offset)
                # Acquired one after the other, so that each sees the room the others left.
                return self._limit_from(entry, index, end)
        return end

    def is_on_its_way(self, entry: Entry, position: int) -> bool:
        """Whether a picture over this position is waited for, rather than room for it."""
        return self._waits and any(
            index not in entry.ready_images
            for index, image in enumerate(entry.request.images)
            if image.offset <= position < image.offset + image.count
        )

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
        """Let go of the pictures that end before `computed` tokens, for good or for a while."""
        embeddings, images = self._embeddings, entry.request.images
        if embeddings is None:
            return
        past = [
            index
            for index in sorted(entry.acquired_images)
            if images[index].offset + images[index].count <= computed
        ]
        if not past and not entry.awaited_images:
            return
        to_come = {image.key for image in images if image.offset + image.count > computed}
        for index in past:
            key = images[index].key
            embeddings.release(key)
            entry.acquired_images.remove(index)
            if key in to_come and key not in entry.awaited_images:
                entry.awaited_images.add(key)
                embeddings.await_again(key)
        for key in sorted(entry.awaited_images - to_come):
            entry.awaited_images.remove(key)
            embeddings.give_up(key)
        self._note_awaiting(entry)

    def _note_awaiting(self, entry: Entry) -> None:
        is_known = entry in self._awaiting
        if entry.awaited_images and not is_known:
            self._awaiting.append(entry)
        elif is_known and not entry.awaited_images:
            self._awaiting.remove(entry)

    def _takes_awaited(self, entry: Entry) -> bool:
        return not self._awaiting or self._awaiting[0] is entry

    def _limit_from(self, entry: Entry, first: int, end: int) -> int:
        embeddings = self._embeddings
        assert embeddings is not None
        takes = self._takes_awaited(entry)
        room = embeddings.room(takes)
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
                room -= image.count if embeddings.is_spare(image.key, takes) else 0
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
