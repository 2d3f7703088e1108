"""Which pictures' embeddings are held, and which may be forgotten when others need the room.

Held by content: two requests with one picture share its rows. A reference is one occurrence in
one running request, taken when a step that covers it is planned. A picture that a running request
will come to again is awaited: between the two steps it gives way after all others, and only to a
request that cannot be asked to wait for its last place.
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
        # By how many running requests; few, so what is idle of them is summed when asked for.
        self._awaited: dict[bytes, int] = {}
        self._dropped: list[bytes] = []
        self.num_idle_tokens = 0

    @property
    def free(self) -> int:
        """Tokens that are not taken."""
        return self.capacity - self.used

    def holds(self, key: bytes, count: int) -> bool:
        """Whether exactly this picture is held; another size under one key is another picture."""
        held = self._held.get(key)
        return held is not None and held.count == count

    def is_spare(self, key: bytes, takes_awaited: bool) -> bool:
        """Whether a held picture may be dropped for another: see `room`."""
        return key in self._idle and (takes_awaited or key not in self._awaited)

    def room(self, takes_awaited: bool) -> int:
        """Tokens that are free or can be freed.

        Args:
            takes_awaited: awaited pictures may be dropped too.
        """
        room = self.free + self.num_idle_tokens
        if not takes_awaited:
            room -= sum(self._held[key].count for key in self._awaited if key in self._idle)
        return room

    def await_again(self, key: bytes) -> None:
        """A running request will come to this picture again."""
        self._awaited[key] = self._awaited.get(key, 0) + 1

    def give_up(self, key: bytes) -> None:
        """Undo one `await_again`."""
        self._awaited[key] -= 1
        if not self._awaited[key]:
            del self._awaited[key]

    def can_acquire(self, key: bytes, count: int, takes_awaited: bool = True) -> bool:
        """Whether `acquire` would succeed, without dropping an awaited picture unless allowed."""
        if self.holds(key, count):
            return True
        if key in self._held and key not in self._idle:
            return False
        return count <= self.room(takes_awaited)

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
            spare = (each for each in self._idle if each not in self._awaited)
            self._drop(next(spare, None) or next(iter(self._idle)))
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
