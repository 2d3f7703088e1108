"""What images cost here, and what a hit therefore saved: the encoder's reports."""

from dataclasses import dataclass, replace
from typing import Self

from opentelemetry import trace

from k3wire.costs import CostFit
from k3wire.messages.base import Outcome, StageReport
from k3wire.telemetry import metrics
from k3wire.telemetry.tracing import note_report

DOUBTS = (0.01, 0.0, 0.03)
"""Against the cost of an image, of a token and of a pair of tokens, all of which look at all."""

KEPT_SHARE = 0.9
"""What the next image leaves of the tokens and seconds that make the rate."""

HITS = ("local", "shared", "joined")
"""Ways in which an image was had without its being computed for it."""


@dataclass(frozen=True, slots=True)
class Work:
    """What computing one image took; times are nanoseconds.

    Attributes:
        reports: of the deeper stages.
        deeper_ns: time that they took.
        wait_ns: time in queues of this process, and for other encoders.
    """

    reports: tuple[StageReport, ...] = ()
    deeper_ns: int = 0
    wait_ns: int = 0

    def waited(self, wait_ns: int) -> Self:
        """The same work after a longer wait."""
        return replace(self, wait_ns=self.wait_ns + wait_ns)


NO_WORK = Work()


@dataclass(frozen=True, slots=True)
class Answer:
    """One image as it was answered.

    Attributes:
        detail: how it was had.
        is_kept: whether tier L3 has it now.
        work: that it took.
        num_tokens: of it.
        size_bytes: of its embeddings.
        start_unix_ns: when it was asked for.
        spent_ns: from then to its delivery.
    """

    detail: str
    is_kept: bool
    work: Work
    num_tokens: int
    size_bytes: int
    start_unix_ns: int
    spent_ns: int


class Costs:
    """What images cost, and reports by it."""

    def __init__(self, worker_id: str) -> None:
        """Knows nothing yet; `worker_id` is who reports."""
        self._worker_id = worker_id
        self._fit = CostFit(DOUBTS)
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """How fast images are made, 0 before the first."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def learn(self, num_tokens: int, cost_ns: int) -> None:
        """Notes what an image cost."""
        seconds = max(1, cost_ns) / 1e9
        self._tokens = KEPT_SHARE * self._tokens + num_tokens
        self._seconds = KEPT_SHARE * self._seconds + seconds
        self._fit.learn(_counts(num_tokens), seconds)

    def report(self, answer: Answer) -> StageReport:
        """Reports one image, to its request and to the counters."""
        is_hit = answer.detail in HITS
        computed: Outcome = "miss" if answer.is_kept else "bypass"
        expected_ns = int(1e9 * self._fit.predict_s(_counts(answer.num_tokens)))
        work, spent_ns = answer.work, answer.spent_ns
        report = StageReport(
            stage="encoder",
            tier="L3",
            outcome="hit" if is_hit else computed,
            worker_id=self._worker_id,
            start_unix_ns=answer.start_unix_ns,
            duration_ns=max(0, spent_ns - work.deeper_ns - work.wait_ns),
            wait_ns=work.wait_ns,
            saved_ns=max(0, expected_ns - spent_ns) if is_hit else 0,
            size_bytes=answer.size_bytes,
            num_hits=int(is_hit),
            detail=answer.detail,
        )
        note_report(trace.get_current_span(), report)
        metrics.TIER_LOOKUPS.labels(report.tier, report.outcome).inc()
        metrics.TIER_SAVED.labels(report.tier).inc(report.saved_ns / 1e9)
        metrics.STAGE_DURATION.labels(report.stage).observe(report.duration_ns / 1e9)
        return report


def _counts(num_tokens: int) -> tuple[int, int, int]:
    return 1, num_tokens, num_tokens * num_tokens
