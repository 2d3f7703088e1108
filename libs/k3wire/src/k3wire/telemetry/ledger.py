"""The TTFT ledger: what each stage and tier cost and saved, added up from the stages' reports.

Pure functions of reports. Times of one stage with several reports (many images) are summed, so a
stage that works on images side by side may show more than the clock; `clock_ms` is the clock.
"""

from collections.abc import Iterable, Sequence

import msgspec

from k3wire.messages.base import Outcome, Stage, StageReport, Tier

ORDER: tuple[Stage, ...] = (
    "gateway", "fetcher", "preprocessor", "encoder", "prefill", "decode",
)  # fmt: skip
"""Stages as a request meets them."""

NS_PER_MS = 1e6


class LedgerLine(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of one request.

    Attributes:
        stage: which.
        tier: the cache tier it owns, `none` if it has none.
        outcome: over all its items.
        spent_ms: in the stage itself.
        wait_ms: in its queue.
        saved_ms: by hits.
        num_items: images or tokens asked for.
        num_hits: of them from the tier.
        start_ms: after the request's arrival.
        detail: of the last report.
    """

    stage: Stage
    tier: Tier
    outcome: Outcome
    spent_ms: float
    wait_ms: float
    saved_ms: float
    num_items: int
    num_hits: int
    start_ms: float
    detail: str


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """All stages of one request.

    Attributes:
        clock_ms: from arrival to the first token.
        saved_ms: sum over tiers.
        lines: in the order in which a request meets the stages; skipped stages are missing.
    """

    clock_ms: float
    saved_ms: float
    lines: tuple[LedgerLine, ...]


def build_ledger(
    reports: Iterable[StageReport], arrival_unix_ns: int, first_token_unix_ns: int
) -> Ledger:
    """Adds reports up.

    Args:
        reports: of one request, in any order.
        arrival_unix_ns: when the gateway got the request.
        first_token_unix_ns: when it got the first token.
    """
    by_place: dict[tuple[Stage, Tier], list[StageReport]] = {}
    for report in reports:
        by_place.setdefault((report.stage, report.tier), []).append(report)
    lines = tuple(
        _line(group, arrival_unix_ns)
        for (_, _), group in sorted(by_place.items(), key=lambda item: ORDER.index(item[0][0]))
    )
    return Ledger(
        clock_ms=round((first_token_unix_ns - arrival_unix_ns) / NS_PER_MS, 3),
        saved_ms=round(sum(line.saved_ms for line in lines), 3),
        lines=lines,
    )


def _line(group: Sequence[StageReport], arrival_unix_ns: int) -> LedgerLine:
    num_items = sum(report.num_items for report in group)
    num_hits = sum(report.num_hits for report in group)
    return LedgerLine(
        stage=group[0].stage,
        tier=group[0].tier,
        outcome=_outcome(group),
        spent_ms=round(sum(report.duration_ns for report in group) / NS_PER_MS, 3),
        wait_ms=round(sum(report.wait_ns for report in group) / NS_PER_MS, 3),
        saved_ms=round(sum(report.saved_ns for report in group) / NS_PER_MS, 3),
        num_items=num_items,
        num_hits=num_hits,
        start_ms=round(
            (min(report.start_unix_ns for report in group) - arrival_unix_ns) / NS_PER_MS, 3
        ),
        detail=group[-1].detail,
    )


def _outcome(group: Sequence[StageReport]) -> Outcome:
    outcomes = {report.outcome for report in group}
    if len(outcomes) == 1:
        return group[0].outcome
    return "partial" if outcomes & {"hit", "partial"} else "miss"


def server_timing(ledger: Ledger) -> str:
    """Gives the `Server-Timing` header: time spent a stage, with tier and outcome described."""
    parts = [
        f'{line.stage};dur={line.spent_ms:.1f};desc="{line.tier} {line.outcome}, '
        f'saved {line.saved_ms:.1f} ms"'
        for line in ledger.lines
    ]
    return ", ".join([*parts, f"ttft;dur={ledger.clock_ms:.1f}"])
