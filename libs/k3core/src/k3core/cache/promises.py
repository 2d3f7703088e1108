"""Checkpoints that running requests are going to seal, so that others may wait for them."""

from k3core.cache.positions import StateClass
from k3core.cache.sequence import Sequence


class Promises:
    """Digest -> position of what is coming, counted by how many sequences announced it.

    Attributes:
        pending: what lookups read.
    """

    def __init__(self, unit_tokens: int) -> None:
        self._unit_tokens = unit_tokens
        self._announcers: dict[bytes, int] = {}
        self.pending: dict[bytes, int] = {}

    def announce(self, sequence: Sequence) -> None:
        """Let others know what will be sealed, so that they may wait instead of computing it."""
        for position, reason in sequence.targets.items():
            place = position // self._unit_tokens - 1
            if reason > StateClass.OPPORTUNISTIC and place < len(sequence.digests):
                digest = sequence.digests[place]
                sequence.announced[position] = digest
                self.pending[digest] = position
                self._announcers[digest] = self._announcers.get(digest, 0) + 1

    def settle(self, sequence: Sequence) -> None:
        """What was announced up to here was sealed or was not: nobody need wait for it."""
        passed = [p for p in sequence.announced if p <= sequence.num_computed]
        for position in passed:
            self._withdraw(sequence.announced.pop(position))

    def drop(self, sequence: Sequence) -> None:
        """The sequence stops: nothing more will come of it."""
        for digest in sequence.announced.values():
            self._withdraw(digest)
        sequence.announced = {}

    def _withdraw(self, digest: bytes) -> None:
        self._announcers[digest] -= 1
        if not self._announcers[digest]:
            del self._announcers[digest], self.pending[digest]
