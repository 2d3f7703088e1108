"""Which prefill workers are alive, by the beats that this worker hears."""

import time
from collections.abc import Callable

from k3wire.messages.control import HEARTBEAT_STALE_S, Heartbeat

_FORGET_S = 60.0


class Peers:
    """When each peer was last heard of."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Knows nobody; `clock` gives monotonic seconds."""
        self._clock = clock
        self._heard_s: dict[str, float] = {}
        self._draining: set[str] = set()

    def hear(self, beat: Heartbeat) -> None:
        """Takes a beat."""
        now_s = self._clock()
        if beat.worker_id not in self._heard_s:
            old = [peer for peer, at_s in self._heard_s.items() if now_s - at_s > _FORGET_S]
            for peer in old:
                del self._heard_s[peer]
                self._draining.discard(peer)
        self._heard_s[beat.worker_id] = now_s
        if beat.is_draining:
            self._draining.add(beat.worker_id)

    def is_lost(self, worker_id: str, since_s: float) -> bool:
        """Whether a peer that was there at `since_s` has been silent for too long.

        A peer that was never heard of counts from `since_s`. One that drains may be silent while
        it finishes; the reservation's deadline covers its death.
        """
        if worker_id in self._draining:
            return False
        last_s = max(self._heard_s.get(worker_id, since_s), since_s)
        return self._clock() - last_s > HEARTBEAT_STALE_S
