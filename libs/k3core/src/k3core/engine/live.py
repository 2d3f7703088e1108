"""What an engine keeps in mind: each request it knows, and how fast and full it is."""

from collections.abc import Collection
from dataclasses import dataclass, field

from k3core.cache.coordinator import PrefixCache
from k3core.engine.costs import StepFit, num_pairs
from k3core.engine.words import EngineLoad, EngineRequest
from k3core.scheduler.plan import StepPlan
from k3core.scheduler.scheduler import SchedulerConfig

KEPT_SHARE = 0.9
"""What the next step leaves of the tokens and seconds that make the measured rate."""

LOAD_INTERVAL_S = 0.02
"""A busy engine's figures are read ten times a second, and its steps can be thousands."""


@dataclass(slots=True)
class LiveRequest:
    """One request while the engine knows it.

    Attributes:
        request: as added.
        position: output position of the next token.
        num_computed: prompt tokens in place.
        num_told_units: units of the prompt that `progress` events have named.
        is_admitted: its prefix was looked up.
        is_held: prefilled, pages held for a hand-off.
        state_pages: where a reserved request's state arrives; empty otherwise.
        unsent: tokens waiting to reach the stream together.
        provided_images: indices of images that arrived.
    """

    request: EngineRequest
    position: int
    num_computed: int = 0
    num_told_units: int = 0
    is_admitted: bool = False
    is_held: bool = False
    state_pages: tuple[int, ...] = ()
    unsent: list[int] = field(default_factory=list[int])
    provided_images: set[int] = field(default_factory=set[int])

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.request.tokens)


class Meter:
    """Follows an engine's rate and makes the figures that its loop reads."""

    def __init__(self, config: SchedulerConfig, cache: PrefixCache) -> None:
        """Starts with nothing measured."""
        self._is_decode = config.role == "decode"
        self._cache = cache
        self._fit = StepFit(max(config.chunk_tokens))
        self._tokens = 0.0
        self._seconds = 0.0
        self._fresh_until_s = 0.0
        self.load = EngineLoad()

    def measure(self, plan: StepPlan, seconds: float) -> None:
        """Takes a step's work: prompt tokens, or output tokens on a decode worker."""
        rows = [row for row in plan.rows if row.is_decode == self._is_decode]
        num_tokens = sum(row.length for row in rows)
        if not num_tokens or seconds <= 0.0:
            return
        # Sums, not an average of rates, in which a short step would weigh like a long one.
        self._tokens = KEPT_SHARE * self._tokens + num_tokens
        self._seconds = KEPT_SHARE * self._seconds + seconds
        if not self._is_decode and len(rows) == len(plan.rows):
            pairs = sum(num_pairs(row.start, row.length) for row in rows)
            self._fit.learn(num_tokens, pairs, seconds)

    def publish(self, requests: Collection[LiveRequest], now_s: float, *, is_idle: bool) -> None:
        """Replaces the figures, at once when idle and else now and then.

        It is one assignment, so the loop may read `load` without a lock.
        """
        if not is_idle and now_s < self._fresh_until_s:
            return
        self._fresh_until_s = now_s + LOAD_INTERVAL_S
        num_waiting = sum(not each.is_admitted for each in requests)
        self.load = EngineLoad(
            num_running=len(requests) - num_waiting,
            num_waiting=num_waiting,
            num_queued_tokens=sum(each.num_prompt_tokens - each.num_computed for each in requests),
            num_free_pages=self._cache.reclaimable_pages() + self._cache.states.num_idle_pages,
            num_pages=self._cache.config.num_pages,
            tokens_per_s=self._tokens / self._seconds if self._seconds else 0.0,
            costs=self._fit.costs,
        )
