"""A cache bounded by bytes that forgets what was used longest ago."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByteLru(Generic[K, V]):
    """Values by key; the sum of their sizes never exceeds the capacity.

    Attributes:
        capacity_bytes: the bound; 0 keeps nothing.
        size_bytes: held now.
        num_evicted: entries forgotten to make room.
    """

    def __init__(self, capacity_bytes: int, size_of: Callable[[V], int]) -> None:
        """Starts empty.

        Args:
            capacity_bytes: the bound.
            size_of: bytes that a value counts for; must not change while it is held.
        """
        self.capacity_bytes = capacity_bytes
        self.size_bytes = 0
        self.num_evicted = 0
        self._size_of = size_of
        self._values: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K) -> V | None:
        """Gives a value and marks it as used, or None."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> bool:
        """Holds a value, replacing an older one; False if it is larger than the whole cache."""
        self.remove(key)
        size = self._size_of(value)
        if size > self.capacity_bytes:
            return False
        while self.size_bytes + size > self.capacity_bytes:
            _, oldest = self._values.popitem(last=False)
            self.size_bytes -= self._size_of(oldest)
            self.num_evicted += 1
        self._values[key] = value
        self.size_bytes += size
        return True

    def remove(self, key: K) -> V | None:
        """Forgets a key; gives what it held."""
        value = self._values.pop(key, None)
        if value is not None:
            self.size_bytes -= self._size_of(value)
        return value

    def clear(self) -> None:
        """Forgets everything."""
        self._values.clear()
        self.size_bytes = 0
