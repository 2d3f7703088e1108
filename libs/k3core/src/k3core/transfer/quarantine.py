"""Names that are left alone for a while, because asking them again at once would be in vain."""

import time


class Quarantine:
    """A bounded table of names, each left alone until its time is over."""

    def __init__(self, for_s: float, limit: int) -> None:
        """Starts empty.

        Args:
            for_s: how long a name is left alone.
            limit: names at most; the oldest give way.
        """
        self._for_s = for_s
        self._limit = limit
        self._until_s: dict[str, float] = {}

    def __contains__(self, name: str) -> bool:
        return self._until_s.get(name, 0.0) > time.monotonic()

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, name: str) -> None:
        """Leaves a name alone from now on."""
        self._until_s.pop(name, None)
        self._until_s[name] = time.monotonic() + self._for_s
        while len(self._until_s) > self._limit:
            del self._until_s[next(iter(self._until_s))]

    def discard(self, name: str) -> None:
        """Takes a name back, if it was here."""
        self._until_s.pop(name, None)
