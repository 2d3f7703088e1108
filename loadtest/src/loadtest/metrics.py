"""Figures as pure functions of records; percentiles come from raw values.

TTFT, ITL, E2E in milliseconds, throughput in tokens a second, goodput as the share of counted
requests within the scenario's limits. Latency counts from the intended send time.
"""

from collections.abc import Sequence

from loadtest.record import Record
from loadtest.scenario import Scenario

NS_PER_MS = 1e6


def percentile(values: Sequence[float], share: float) -> float:
    """Gives the nearest-rank percentile; NaN of nothing."""
    if not values:
        return float("nan")
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, max(0, round(share * len(ranked) + 0.5) - 1))]


def counted(records: Sequence[Record]) -> list[Record]:
    """Leaves out the warm-up and the requests cancelled on purpose."""
    return [r for r in records if not r.is_warmup and not r.is_cancelled]


def ttft_ms(record: Record) -> float | None:
    """Time to first text, or None if none came."""
    return (record.chunk_ns[0] - record.intended_ns) / NS_PER_MS if record.chunk_ns else None


def itl_ms(record: Record) -> float | None:
    """Mean gap between pieces of text, or None with fewer than two."""
    if len(record.chunk_ns) < 2:
        return None
    return (record.chunk_ns[-1] - record.chunk_ns[0]) / NS_PER_MS / (len(record.chunk_ns) - 1)


def e2e_ms(record: Record) -> float:
    """Time to the complete answer."""
    return (record.end_ns - record.intended_ns) / NS_PER_MS


def is_good(record: Record, scenario: Scenario) -> bool:
    """Whether the request succeeded within the scenario's limits."""
    first, gap = ttft_ms(record), itl_ms(record)
    if record.error or record.status != 200:
        return False
    if first is not None and first > scenario.limit_ttft_ms:
        return False
    return gap is None or gap <= scenario.limit_itl_ms


def summarise(records: Sequence[Record], scenario: Scenario) -> dict[str, float]:
    """Computes every figure of the report from the records."""
    kept = counted(records)
    good = [r for r in kept if not r.error and r.status == 200]
    firsts = [value for r in good if (value := ttft_ms(r)) is not None]
    gaps = [value for r in good if (value := itl_ms(r)) is not None]
    ends = [e2e_ms(r) for r in good]
    span_s = (max(r.end_ns for r in kept) - min(r.intended_ns for r in kept)) / 1e9 if kept else 0.0
    prompt = sum(r.num_prompt_tokens for r in good)
    return {
        "requests": len(kept),
        "failed": len(kept) - len(good),
        "cancelled": sum(r.is_cancelled for r in records),
        "request_rate_rps": len(good) / span_s if span_s else 0.0,
        "output_tokens_per_s": sum(r.num_output_tokens for r in good) / span_s if span_s else 0.0,
        "cached_share": sum(r.num_cached_tokens for r in good) / prompt if prompt else 0.0,
        "ttft_ms_p50": percentile(firsts, 0.50),
        "ttft_ms_p95": percentile(firsts, 0.95),
        "ttft_ms_p99": percentile(firsts, 0.99),
        "itl_ms_p50": percentile(gaps, 0.50),
        "itl_ms_p95": percentile(gaps, 0.95),
        "e2e_ms_p50": percentile(ends, 0.50),
        "e2e_ms_p95": percentile(ends, 0.95),
        "goodput": sum(is_good(r, scenario) for r in kept) / len(kept) if kept else 0.0,
    }
