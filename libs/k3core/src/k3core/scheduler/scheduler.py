"""Which rows run next: continuous batching over one prefix cache.

Requests enter; plans leave; results come back. No clock, no I/O, no tensor: the same inputs
give the same plans. What must always hold: a page that a planned step may touch is not given
to anyone else before that step was committed, and nothing that a step writes is visible to
another request before that commit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from k3core.cache.coordinator import PrefixCache
from k3core.scheduler.plan import Event, HandOff, Reservation, RowResult, StepPlan, Usage
from k3core.scheduler.request import Request

Role: TypeAlias = Literal["combined", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step.

    Attributes:
        role: `prefill` holds pages after the first token; `decode` adopts; `combined` does both.
        chunk_tokens: token budget of a step, or several used in turn.
        max_rows: sequences in a step.
        encoder_tokens: capacity of the embedding buffer, in image tokens; 0 for no bound.
        waits_for_embeddings: a chunk stops before a picture until `set_embedding_ready`.
    """

    role: Role = "combined"
    chunk_tokens: tuple[int, ...] = (8192,)
    max_rows: int = 256
    encoder_tokens: int = 0
    waits_for_embeddings: bool = False


class Scheduler:
    """The queue, the batch and their cache. Not thread safe: one engine thread owns it."""

    def __init__(self, config: SchedulerConfig, cache: PrefixCache) -> None:
        self.config = config
        self.cache = cache

    def add(self, request: Request) -> Event | None:
        """Queue a request. Returns a `refused` event if it could never fit, else None."""
        raise NotImplementedError

    def abort(self, request_id: str) -> bool:
        """Forget a request in any state; pages return once no planned step can touch them.

        Returns:
            False if it is not known (ended already, or never was): nothing changed.
        """
        raise NotImplementedError

    def preempt(self, request_id: str) -> bool:
        """Take a running request off the batch; it waits at the front and resumes later."""
        raise NotImplementedError

    def schedule(self) -> StepPlan:
        """Decide the next step; a plan without rows means there is nothing to run now."""
        raise NotImplementedError

    def commit(self, plan: StepPlan, results: Sequence[RowResult]) -> list[Event]:
        """Take what a step did: seal exports, append tokens, end requests, free pages.

        Plans are committed in the order they were made. Rows of requests aborted meanwhile
        are ignored.
        """
        raise NotImplementedError

    def fail(self, plan: StepPlan) -> None:
        """Undo a step that did not run: nothing is sealed, its rows will be planned again."""
        raise NotImplementedError

    def set_embedding_ready(self, request_id: str, index: int) -> None:
        """The embeddings of the request's image `index` are in the worker's buffer."""
        raise NotImplementedError

    def usage(self, request_id: str) -> Usage | None:
        """Counts of an admitted request; kept until `forget_usage` or its end event was read."""
        raise NotImplementedError

    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        raise NotImplementedError

    def hand_off(self, request_id: str, job: str) -> HandOff:
        """Pin a prefilled request's pages for one transfer job.

        Raises:
            CacheError: if the request holds no finished prompt.
        """
        raise NotImplementedError

    def close_transfer(self, job: str) -> bool:
        """Let go of a job's pins; False if unknown (a duplicate acknowledgement)."""
        raise NotImplementedError

    def release(self, request_id: str) -> bool:
        """End a prefilled request: publish its state, free what no transfer job pins."""
        raise NotImplementedError

    def reserve(self, request: Request) -> Reservation | None:
        """Make room on a decode worker for a prompt; None if it does not fit now.

        `abort(request_id)` gives the room back.
        """
        raise NotImplementedError

    def adopt(self, request_id: str, first_token: int) -> None:
        """The reserved pages were filled: join the batch, continuing after `first_token`."""
        raise NotImplementedError
