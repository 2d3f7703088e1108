"""Which prefill and which decode worker gets a request.

Prefill: the lowest predicted time to first token among the worker that holds the longest known
prefix and two drawn at random; a worker's queue is its last reported one, corrected by what this
gateway sent since. Decode: the most free pages a running request, likewise corrected. Missing
figures are read as busy, never as idle. Pure bookkeeping: no I/O and no clock.
"""

import hashlib
import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from k3wire.errors import Overloaded
from k3wire.messages.control import Heartbeat

AFFINITY_STRIDE_TOKENS = 512
"""Prompt prefixes are remembered at multiples of so many tokens."""

MAX_AFFINITY_ENTRIES = 65536
"""Prefixes remembered over all workers; the least recently used go first."""

UNKNOWN_RATE_TOKENS_PER_S = 500.0
"""Prefill rate of a worker that has not measured its own yet; low, so that it gets a ramp."""

EXPLORE_SHARE = 0.01
"""Requests that go to a random worker, so that a wrong prediction is noticed."""

TOKEN_BYTES = 4


def prefix_digests(token_ids: bytes, salt: str) -> list[bytes]:
    """Digests of the prompt's prefixes at every stride, chained, shortest first."""
    digests: list[bytes] = []
    parent = salt.encode()
    step = AFFINITY_STRIDE_TOKENS * TOKEN_BYTES
    for start in range(0, len(token_ids) - step + 1, step):
        parent = hashlib.blake2b(parent + token_ids[start : start + step], digest_size=16).digest()
        digests.append(parent)
    return digests


@dataclass(slots=True)
class Claim:
    """What this gateway sent to a worker and has not seen ended."""

    num_requests: int = 0
    num_tokens: int = 0


class Router:
    """Chooses workers and remembers what it sent where."""

    def __init__(self, gateway_id: str, seed: int) -> None:
        """Starts with no memory.

        Args:
            gateway_id: as it stands in the workers' `active_by_gateway`.
            seed: of its draws.
        """
        self._gateway_id = gateway_id
        self._random = random.Random(seed)
        self._claims: dict[str, Claim] = {}
        self._prefixes: OrderedDict[bytes, str] = OrderedDict()

    def choose_prefill(
        self, workers: Sequence[Heartbeat], num_tokens: int, digests: Sequence[bytes]
    ) -> Heartbeat:
        """Chooses the worker for a prompt.

        Args:
            workers: ready ones, fresh, not excluded.
            num_tokens: of the prompt.
            digests: from `prefix_digests`.

        Raises:
            Overloaded: there is none.
        """
        if not workers:
            raise Overloaded("No prefill worker is ready; try again in a moment", retry_after_s=2)
        if self._random.random() < EXPLORE_SHARE:
            return self._random.choice(workers)
        held = self._held_tokens(digests)
        best_held = max(workers, key=lambda worker: held.get(worker.worker_id, 0))
        drawn = self._random.sample(list(workers), min(2, len(workers)))
        return min(
            [*drawn, best_held],
            key=lambda worker: self._predict_s(worker, num_tokens, held.get(worker.worker_id, 0)),
        )

    def choose_decode(self, workers: Sequence[Heartbeat]) -> Heartbeat:
        """Chooses who continues after the first token.

        Raises:
            Overloaded: there is none.
        """
        if not workers:
            raise Overloaded("No decode worker is ready; try again in a moment", retry_after_s=2)
        drawn = self._random.sample(list(workers), len(workers))
        return max(drawn, key=self._room)

    def note_sent(self, worker_id: str, num_tokens: int, digests: Iterable[bytes] = ()) -> None:
        """Counts a request as being at a worker, and remembers its prefixes there."""
        claim = self._claims.setdefault(worker_id, Claim())
        claim.num_requests += 1
        claim.num_tokens += num_tokens
        for digest in digests:
            self._prefixes[digest] = worker_id
            self._prefixes.move_to_end(digest)
        while len(self._prefixes) > MAX_AFFINITY_ENTRIES:
            self._prefixes.popitem(last=False)

    def note_ended(self, worker_id: str, num_tokens: int) -> None:
        """Takes a request off a worker; exactly once for each `note_sent`."""
        claim = self._claims.get(worker_id)
        if claim is None:
            return
        claim.num_requests -= 1
        claim.num_tokens -= num_tokens
        if claim.num_requests <= 0:
            del self._claims[worker_id]

    def forget_worker(self, worker_id: str) -> None:
        """Drops what is remembered of a worker that is gone."""
        self._claims.pop(worker_id, None)
        self._prefixes = OrderedDict(
            (digest, holder) for digest, holder in self._prefixes.items() if holder != worker_id
        )

    def num_claimed(self, worker_id: str) -> int:
        """Requests of this gateway at a worker."""
        claim = self._claims.get(worker_id)
        return claim.num_requests if claim else 0

    def _held_tokens(self, digests: Sequence[bytes]) -> dict[str, int]:
        held: dict[str, int] = {}
        for place, digest in enumerate(digests):
            holder = self._prefixes.get(digest)
            if holder is not None:
                held[holder] = (place + 1) * AFFINITY_STRIDE_TOKENS
        return held

    def _unseen(self, worker: Heartbeat) -> Claim:
        # The beat counts what reached the worker before it was sent; the rest is still ours to add.
        claim = self._claims.get(worker.worker_id, Claim())
        known = worker.load.active_by_gateway.get(self._gateway_id, 0)
        missing = max(0, claim.num_requests - known)
        share = missing / claim.num_requests if claim.num_requests else 0.0
        return Claim(num_requests=missing, num_tokens=int(claim.num_tokens * share))

    def _predict_s(self, worker: Heartbeat, num_tokens: int, num_held: int) -> float:
        rate = worker.load.tokens_per_s or UNKNOWN_RATE_TOKENS_PER_S
        queued = worker.load.num_queued_tokens + self._unseen(worker).num_tokens
        return (queued + max(1, num_tokens - num_held)) / rate

    def _room(self, worker: Heartbeat) -> float:
        unseen = self._unseen(worker).num_requests
        running = worker.load.num_running + worker.load.num_waiting + unseen
        return worker.load.num_free_pages / (1 + running)
