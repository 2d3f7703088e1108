"""What images cost here, and what a hit therefore saved: the encoder's reports."""

from dataclasses import dataclass, replace
from typing import Self

from opentelemetry import trace

from k3wire.messages.base import Outcome, StageReport
from k3wire.telemetry import metrics
from k3wire.telemetry.tracing import note_report

COST_WEIGHT = 0.2
"""Weight of the newest measurement in the moving average of the cost of a token."""

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
    """The moving average, and reports by it."""

    def __init__(self, worker_id: str) -> None:
        """Knows nothing yet; `worker_id` is who reports."""
        self._worker_id = worker_id
        self._ns_per_token = 0.0

    @property
    def tokens_per_s(self) -> float:
        """How fast images are made, 0 before the first."""
        return 1e9 / self._ns_per_token if self._ns_per_token else 0.0

    def learn(self, cost_ns: float) -> None:
        """Notes what a token cost."""
        last = self._ns_per_token or cost_ns
        self._ns_per_token = last + COST_WEIGHT * (cost_ns - last)

    def report(self, answer: Answer) -> StageReport:
        """Reports one image, to its request and to the counters."""
        is_hit = answer.detail in HITS
        computed: Outcome = "miss" if answer.is_kept else "bypass"
        expected_ns = int(self._ns_per_token * answer.num_tokens)
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
