"""The ledger: reports of a request, added up."""

from typing import Any

from k3wire.messages.base import StageReport
from k3wire.telemetry.ledger import Ledger, LedgerLine, build_ledger, server_timing

START_NS = 1_790_000_000_000_000_000


def report(**fields: Any) -> StageReport:
    given: dict[str, Any] = {
        "stage": "encoder", "tier": "L3", "outcome": "hit", "worker_id": "w",
        "start_unix_ns": START_NS, "duration_ns": 2_000_000, **fields,
    }  # fmt: skip
    return StageReport(**given)


def test_reports_of_a_stage_are_added_up_in_the_order_of_stages() -> None:
    ledger = build_ledger(
        [
            report(stage="prefill", tier="L4", outcome="miss", num_items=300, detail="cold"),
            report(saved_ns=5_000_000, num_hits=1, wait_ns=500_000, detail="local"),
            report(outcome="miss", start_unix_ns=START_NS - 1_500_000, detail="computed"),
        ],
        START_NS - 2_000_000,
        START_NS + 10_000_000,
    )
    assert ledger == Ledger(
        clock_ms=12.0,
        saved_ms=5.0,
        lines=(
            LedgerLine(
                stage="encoder", tier="L3", outcome="partial", spent_ms=4.0, wait_ms=0.5,
                saved_ms=5.0, num_items=2, num_hits=1, start_ms=0.5, detail="computed",
            ),
            LedgerLine(
                stage="prefill", tier="L4", outcome="miss", spent_ms=2.0, wait_ms=0.0, saved_ms=0.0,
                num_items=300, num_hits=0, start_ms=2.0, detail="cold",
            ),
        ),
    )  # fmt: skip


def test_outcomes_of_many_items_are_told_honestly() -> None:
    def outcome(*outcomes: str) -> str:
        reports = [report(outcome=each) for each in outcomes]
        return build_ledger(reports, START_NS, START_NS).lines[0].outcome

    assert outcome("hit", "hit") == "hit"
    assert outcome("miss", "miss") == "miss"
    assert outcome("bypass") == "bypass"
    assert outcome("hit", "miss") == "partial"
    assert outcome("partial", "miss") == "partial"
    assert outcome("bypass", "miss") == "miss"


def test_an_empty_ledger_is_only_the_clock() -> None:
    ledger = build_ledger([], START_NS, START_NS + 1_000_000)
    assert ledger == Ledger(clock_ms=1.0, saved_ms=0.0, lines=())
    assert server_timing(ledger) == "ttft;dur=1.0"


def test_the_header_is_one_line_that_browsers_read() -> None:
    ledger = build_ledger([report(saved_ns=7_000_000, num_hits=1)], START_NS, START_NS + 3_000_000)
    assert server_timing(ledger) == ('encoder;dur=2.0;desc="L3 hit, saved 7.0 ms", ttft;dur=3.0')
