"""One request in the scheduler's books."""

from dataclasses import dataclass, field
from enum import Enum

from k3core.cache.sequence import Sequence
from k3core.scheduler.plan import PlannedExport, Usage
from k3core.scheduler.request import Request


class Status(Enum):
    """Where a request is. WAITING and RUNNING may alternate; the others do not go back."""

    WAITING = "waiting"
    RUNNING = "running"
    RESERVED = "reserved"
    HELD = "held"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Entry:
    """Mutable; owned by the scheduler.

    Attributes:
        request: as it came.
        sequence: its cache side.
        status: where it is.
        is_on_hold: queued, not to be admitted yet.
        in_flight: number of the step its row is in, 0 for none.
        is_preempt_asked: preempt once that step was committed.
        usage: set at first admission, never changed.
        ready_images: indices whose embeddings have arrived, if the scheduler waits for them.
        acquired_images: indices that hold a reference in the embedding cache.
        awaited_images: keys of pictures that were passed and come again.
        jobs: transfers that read or write its pages.
        is_released: ends when the last job does.
        first_token: sampled from the prompt, -1 for none.
        exports: of the row in flight, with the compressed slot of each (() if raw).
    """

    request: Request
    sequence: Sequence
    status: Status = Status.WAITING
    is_on_hold: bool = False
    in_flight: int = 0
    is_preempt_asked: bool = False
    usage: Usage | None = None
    ready_images: set[int] = field(default_factory=set[int])
    acquired_images: set[int] = field(default_factory=set[int])
    awaited_images: set[bytes] = field(default_factory=set[bytes])
    jobs: set[str] = field(default_factory=set[str])
    is_released: bool = False
    first_token: int = -1
    exports: list[tuple[PlannedExport, tuple[int, ...]]] = field(
        default_factory=list[tuple[PlannedExport, tuple[int, ...]]]
    )

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.sequence.tokens) - self.sequence.prompt_length

    @property
    def num_wanted(self) -> int:
        """Tokens still to be sampled."""
        return self.request.max_new_tokens - self.num_generated

    @property
    def is_prefilling(self) -> bool:
        """Whether admission's tokens are not all computed yet."""
        return self.sequence.num_computed < self.sequence.target_length
