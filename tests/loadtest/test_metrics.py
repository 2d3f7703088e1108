"""Figures of the load generator: pure functions of raw records."""

import math
from pathlib import Path

import pytest

from loadtest import arrivals, metrics, record, scenario, workload
from loadtest.record import Record

MS = 1_000_000


def finished(index: int, first_ms: int, gaps_ms: list[int], status: int = 200) -> Record:
    stamps = [first_ms * MS]
    for gap in gaps_ms:
        stamps.append(stamps[-1] + gap * MS)
    return Record(
        index=index,
        intended_ns=0,
        sent_ns=5 * MS,
        chunk_ns=stamps,
        end_ns=stamps[-1],
        status=status,
        num_prompt_tokens=10,
        num_cached_tokens=5,
        num_output_tokens=len(stamps),
    )


def test_latency_counts_from_the_intended_time_not_from_sending() -> None:
    assert metrics.ttft_ms(finished(0, 20, [])) == 20


def test_percentiles_are_values_that_occurred() -> None:
    values = [5.0, 1.0, 9.0, 3.0]
    assert [metrics.percentile(values, p) for p in (0.0, 0.5, 1.0)] == [1.0, 3.0, 9.0]
    assert math.isnan(metrics.percentile([], 0.5))


def test_warm_up_and_cancelled_requests_do_not_count() -> None:
    warm, gone, kept = finished(0, 1, []), finished(1, 1, []), finished(2, 30, [10, 20])
    warm.is_warmup, gone.is_cancelled = True, True
    figures = metrics.summarise([warm, gone, kept], scenario.Scenario())
    assert figures["requests"] == 1
    assert figures["ttft_ms_p50"] == 30
    assert figures["itl_ms_p50"] == 15
    assert figures["cached_share"] == 0.5


def test_goodput_asks_for_success_and_both_limits() -> None:
    plan = scenario.Scenario(limit_ttft_ms=100, limit_itl_ms=10)
    records = [
        finished(0, 50, [5]),
        finished(1, 150, [5]),
        finished(2, 50, [50]),
        finished(3, 50, [5], status=503),
    ]
    assert metrics.summarise(records, plan)["goodput"] == 0.25


def test_records_survive_their_file(tmp_path: Path) -> None:
    records = [finished(0, 1, [2, 3]), finished(1, 4, [])]
    record.write_records(tmp_path / "r.jsonl", records)
    assert record.read_records(tmp_path / "r.jsonl") == records


def test_arrivals_repeat_with_their_seed_and_keep_their_rate() -> None:
    times = list(arrivals.poisson(50, 40, seed=3))
    assert times == list(arrivals.poisson(50, 40, seed=3)) == sorted(times)
    assert 1700 < len(times) < 2300
    middle = [t for t in arrivals.burst(10, 30, 5, seed=1) if 10 <= t < 20]
    assert 350 < len(middle) < 650


@pytest.mark.parametrize("text", ["rate = 3", "rate_rps = 'fast'", "not toml", "is_stream = 1"])
def test_a_scenario_with_a_wrong_key_or_value_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "s.toml"
    path.write_text(text)
    with pytest.raises(scenario.ScenarioError):
        scenario.load_scenario(path)


def test_every_shipped_scenario_loads() -> None:
    folder = Path(__file__).resolve().parents[2] / "loadtest/scenarios"
    names = [scenario.load_scenario(path).name for path in sorted(folder.glob("*.toml"))]
    assert len(names) == len(set(names)) >= 5


def test_bodies_repeat_with_their_seed() -> None:
    plan = scenario.Scenario(num_prefixes=2, prefix_words=3, num_images=1)
    first, second = workload.bodies(plan, "m"), workload.bodies(plan, "m")
    assert [next(first) for _ in range(5)] == [next(second) for _ in range(5)]
