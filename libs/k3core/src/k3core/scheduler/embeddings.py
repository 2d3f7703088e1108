"""Which pictures' embeddings are held, and which may be forgotten when others need the room.

Held by content: two requests with one picture share its rows. A reference is one occurrence in
one running request, taken when a step that covers it is planned: a picture that comes twice stays
for both places if one step covers them, and may give way, to be made again, between two steps.
What must always hold: used + free = capacity; what a planned step needs is never dropped.
"""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class _Held:
    count: int
    references: int


class EmbeddingCache:
    """Room for embeddings, in image tokens.

    Args:
        capacity: tokens that fit.

    Attributes:
        num_idle_tokens: held that nobody refers to.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._held: dict[bytes, _Held] = {}
        # Held without a reference, oldest first.
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._dropped: list[bytes] = []
        self.num_idle_tokens = 0

    @property
    def free(self) -> int:
        """Tokens that are not taken."""
        return self.capacity - self.used

    def is_idle(self, key: bytes) -> bool:
        """Whether a held picture has no reference."""
        return key in self._idle

    def holds(self, key: bytes, count: int) -> bool:
        """Whether exactly this picture is held; another size under one key is another picture."""
        held = self._held.get(key)
        return held is not None and held.count == count

    def can_acquire(self, key: bytes, count: int) -> bool:
        """Whether `acquire` would succeed."""
        if self.holds(key, count):
            return True
        if key in self._held and key not in self._idle:
            return False
        return count <= self.free + self.num_idle_tokens

    def acquire(self, key: bytes, count: int) -> bool:
        """Refer to a picture, dropping unreferenced ones if it needs room.

        Returns:
            Whether its embeddings must be made: True if they were not held.
        """
        assert self.can_acquire(key, count)
        if self.holds(key, count):
            held = self._held[key]
            held.references += 1
            if key in self._idle:
                del self._idle[key]
                self.num_idle_tokens -= held.count
            return False
        if key in self._held:
            self._drop(key)
        while count > self.free:
            self._drop(next(iter(self._idle)))
        self._held[key] = _Held(count, 1)
        self.used += count
        # Dropped and wanted again within one step: the worker is told nothing of it.
        if key in self._dropped:
            self._dropped.remove(key)
        return True

    def release(self, key: bytes) -> None:
        """One occurrence is computed or gone; the embeddings stay until room is needed."""
        held = self._held[key]
        assert held.references > 0
        held.references -= 1
        if not held.references:
            self._idle[key] = None
            self.num_idle_tokens += held.count

    def drain_dropped(self) -> tuple[bytes, ...]:
        """Keys dropped since the last call, each once."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def _drop(self, key: bytes) -> None:
        count = self._held.pop(key).count
        self.used -= count
        self.num_idle_tokens -= count
        del self._idle[key]
        self._dropped.append(key)
