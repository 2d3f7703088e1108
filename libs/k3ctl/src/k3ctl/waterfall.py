"""The waterfall of a request: each stage, tier, hit or miss, milliseconds spent and saved."""

from collections.abc import Sequence

from k3wire.telemetry.ledger import Ledger, LedgerLine

BAR_CELLS = 28


def draw(ledger: Ledger) -> str:
    """Draws a ledger as a table with bars; no trailing newline."""
    head = f"{'stage':13}{'tier':5}{'outcome':9}{'items':>9}{'ms':>9}{'saved ms':>10}  "
    scale_ms = max(ledger.clock_ms, 0.001)
    rows = [head + f"|0{'ms':>{BAR_CELLS - 1}}|".replace("ms", f"{scale_ms:.0f} ms")]
    rows += [_row(line, scale_ms) for line in ledger.lines]
    rows.append(
        f"first token after {ledger.clock_ms:.1f} ms; the tiers saved {ledger.saved_ms:.1f} ms"
    )
    return "\n".join(rows)


def _row(line: LedgerLine, scale_ms: float) -> str:
    items = f"{line.num_hits}/{line.num_items}" if line.tier != "none" else str(line.num_items)
    tier = line.tier if line.tier != "none" else "-"
    bar = _bar(line.start_ms, line.spent_ms, scale_ms)
    outcome = line.outcome if line.tier != "none" else ""
    return (
        f"{line.stage:13}{tier:5}{outcome:9}{items:>9}{line.spent_ms:9.1f}"
        f"{line.saved_ms:10.1f}  |{bar}|"
    )


def _bar(start_ms: float, spent_ms: float, scale_ms: float) -> str:
    first = min(BAR_CELLS - 1, max(0, int(BAR_CELLS * start_ms / scale_ms)))
    length = max(1, round(BAR_CELLS * spent_ms / scale_ms))
    last = min(BAR_CELLS, first + length)
    return " " * first + "#" * (last - first) + " " * (BAR_CELLS - last)


def skipped(lines: Sequence[LedgerLine]) -> str:
    """Says in words which stages did not run, for the demo."""
    seen = {line.stage for line in lines}
    missing = [stage for stage in ("fetcher", "preprocessor", "encoder") if stage not in seen]
    return f"not asked at all: {', '.join(missing)}" if missing else "every stage was asked"
