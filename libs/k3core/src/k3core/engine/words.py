"""The words between an engine and its worker: what is asked of it and what it answers.

No tensor and no bus type appears here, so that a handler, a test and either engine can share
them. A request is known by one key from `add` or `reserve` to its last event.
"""

from dataclasses import dataclass, field
from typing import Literal

from k3core.engine.costs import StepCosts
from k3core.scheduler.plan import HandOff, Usage
from k3core.scheduler.request import Request
from k3wire.errors import K3Error
from k3wire.messages.sampling import FinishReason, SamplingParams

EventKind = Literal["admitted", "progress", "prefilled", "tokens", "failed"]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence to run.

    Attributes:
        request: tokens and images, as the scheduler takes them; its id is the key.
        sampling: how to choose tokens and when to end.
        num_emitted_tokens: trailing prompt tokens that are output of an earlier attempt; the
            next token is drawn at this output position.
    """

    request: Request
    sampling: SamplingParams
    num_emitted_tokens: int = 0

    @property
    def key(self) -> str:
        """What every call and event names it by."""
        return self.request.request_id


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """Something the worker must act on.

    `admitted`: the prefix was looked up: `usage` says what was found, `images` which pictures
    are needed. `progress`: whole units of the prompt are in place: `units`, the first of them
    at token `position`. `prefilled`: the first token is in `token_ids` and the pages are held,
    pinned as `hand_off` says, until `release`. `tokens`: new tokens from output position
    `position` on; with a `finish_reason` the request is over and forgotten. `failed`: likewise
    over, with `error`.

    Attributes:
        kind: which of them.
        key: the request's.
        position: see above.
        token_ids: new output tokens.
        finish_reason: why the answer ended, if it did.
        usage: what the prefix cache gave.
        images: indices of the request's images whose embeddings are needed.
        units: unit ids in order of tokens.
        hand_off: pinned pages; its job's name is the key.
        error: of our tree.
        at_ns: of `admitted`, when that was, by `time.perf_counter_ns`.
    """

    kind: EventKind
    key: str
    position: int = 0
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    images: tuple[int, ...] = ()
    units: tuple[int, ...] = ()
    hand_off: HandOff | None = None
    error: K3Error | None = None
    at_ns: int = 0


@dataclass(frozen=True, slots=True)
class Adoption:
    """How a request that was prefilled elsewhere came in.

    Attributes:
        first_token: sampled there and already sent to the gateway.
        state_pages: pages of the state it was handed over with.
    """

    first_token: int
    state_pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is, as of its last step.

    Attributes:
        num_running: requests admitted and not over, held ones included.
        num_waiting: requests not admitted yet.
        num_queued_tokens: prompt tokens not computed yet, of both.
        num_free_pages: pages free or reclaimable.
        num_pages: pages in all.
        tokens_per_s: measured rate of prompt tokens (prefill) or of output tokens (decode); 0
            until something was measured.
        costs: of prompt tokens; all 0 on a decode worker.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0
    num_free_pages: int = 0
    num_pages: int = 0
    tokens_per_s: float = 0.0
    costs: StepCosts = field(default_factory=StepCosts)


class RowError(Exception):
    """One row of a step cannot be computed; its neighbours can.

    Attributes:
        key: whose row it is.
        error: what its request fails with.
    """

    def __init__(self, key: str, error: K3Error) -> None:
        super().__init__(key)
        self.key = key
        self.error = error
