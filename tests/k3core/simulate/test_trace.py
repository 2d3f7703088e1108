"""A replay of the public traces gives the numbers that were counted by hand from them.

The full table runs where K3_NIGHTLY is set; a few rows of it run always.
"""

import os
from functools import cache
from pathlib import Path

import pytest
from support.shared_data import shared_path

from k3core.cache.spec import CacheConfig, Retention
from k3core.simulate.trace import TraceReport, replay, unlimited
from k3core.simulate.trace_formats import TraceError, TraceFormat, TraceRequest, read_trace

_RATE, _SHARE = 0.0005, 0.005
_END = Retention()
_NONE = Retention(prompt_end=False)
_DENSE = Retention(prompt_end=False, dense=True)
_BOTH = Retention(prompt_end=False, unit_end=True, dense=True)

# unit, grid, retention, promotion, draft, states a session, expected hit, expected recomputed,
# expected states a request, runs always
_AGENTS = {
    "prompt end(128)": (128, 128, _END, "never", "off", 0, 0.9351, 6165, 1.00, True),
    "with junctions": (128, 128, _END, "second_hit", "off", 0, 0.9375, 5938, 1.03, True),
    "with interval": (
        128,
        128,
        Retention(intervals=(16384,)),
        "never",
        "off",
        0,
        0.9440,
        5316,
        1.30,
        False,
    ),
    "with dense 1536": (128, 1536, _BOTH, "never", "off", 0, 0.9459, 5133, 4.28, False),
    "dense 1536": (128, 1536, _DENSE, "never", "off", 0, 0.9388, 5806, None, False),
    "prompt end(1536)": (1536, 1536, _END, "never", "off", 0, 0.9372, 5965, 1.00, True),
    "drop(128)": (128, 128, _END, "never", "drop", 0, 0.9338, 6286, 1.00, False),
    "prompt end, drop(1536)": (1536, 1536, _END, "never", "drop", 0, 0.9217, 7436, 1.00, True),
    "dense, drop(1536)": (1536, 1536, _DENSE, "never", "drop", 0, 0.9231, 7296, None, False),
    "last 4 of a session": (128, 128, _END, "never", "off", 4, 0.9346, 6205, 1.00, False),
    "last 1 of a session": (128, 128, _END, "never", "off", 1, 0.9210, 7500, 1.00, False),
}
# unit, grid, retention, promotion, draft, expected hit, expected states, runs always
_SYNTHETIC = {
    "prompt end": (512, _END, "never", "off", 0.5088, 1604, True),
    "with junctions": (512, _END, "second_hit", "off", 0.5820, 1696, True),
    "junctions": (512, _NONE, "second_hit", "off", 0.4984, 413, False),
    "interval 8192": (512, Retention(intervals=(8192,)), "never", "off", 0.6317, 3544, False),
    "dense 1536": (1536, _DENSE, "never", "off", 0.6351, 12990, False),
    "dense and prompt end": (1536, _BOTH, "never", "off", 0.6478, 14122, False),
    "drop": (512, _END, "never", "drop", 0.4972, 1298, False),
    "junctions, drop": (512, _END, "second_hit", "drop", 0.5684, 1386, True),
}


@cache
def _trace(name: str, kind: TraceFormat, unit: int) -> tuple[TraceRequest, ...]:
    return tuple(read_trace([shared_path(f"data/{name}")], kind, unit))


def _skip_unless(always: bool) -> None:
    if not always and not os.environ.get("K3_NIGHTLY"):
        pytest.skip("K3_NIGHTLY is not set")


def _replay(
    config: CacheConfig, requests: tuple[TraceRequest, ...], states: int = 0
) -> TraceReport:
    return replay(unlimited(config, list(requests)), requests, states_per_session=states)


@pytest.mark.parametrize("row", _AGENTS)
def test_agent_sessions_give_the_counted_numbers(row: str) -> None:
    unit, grid, keep, promotion, draft, states, hit, recomputed, written, always = _AGENTS[row]
    _skip_unless(always)
    config = CacheConfig(
        unit_tokens=unit,
        page_units=1,
        checkpoint_grid=grid,
        export_alignment=1,
        retention=keep,
        promotion=promotion,
        draft=draft,
        # These rows were counted against one earlier prompt at a time.
        is_drop_strict=draft == "drop",
    )
    report = _replay(config, _trace("agent_sessions", "agent-sessions", unit), states)
    assert (report.requests, report.input_tokens) == (1487, 141_168_611)
    assert report.hit_rate == pytest.approx(hit, abs=_RATE)
    assert report.recomputed_per_request["mean"] == pytest.approx(recomputed, rel=_SHARE)
    if written is not None:
        assert report.states_asked / report.requests == pytest.approx(written, abs=0.006)
    if unit == 128:
        assert report.mla_match_rate == pytest.approx(0.9461, abs=_RATE)


@pytest.mark.parametrize("row", _SYNTHETIC)
def test_the_synthetic_trace_gives_the_counted_numbers(row: str) -> None:
    grid, keep, promotion, draft, hit, written, always = _SYNTHETIC[row]
    _skip_unless(always)
    config = CacheConfig(
        unit_tokens=512,
        page_units=1,
        checkpoint_grid=grid,
        export_alignment=1,
        retention=keep,
        promotion=promotion,
        draft=draft,
    )
    report = _replay(config, _trace("mooncake_synthetic.jsonl.gz", "mooncake", 512))
    assert report.requests == 3993
    assert report.mla_match_rate == pytest.approx(0.6504, abs=_RATE)
    assert report.hit_rate == pytest.approx(hit, abs=_RATE)
    assert report.states_written == pytest.approx(written, rel=_SHARE)


def test_a_unit_that_the_blocks_do_not_divide_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}\n'
    )
    with pytest.raises(TraceError, match="128"):
        list(read_trace([path], "mooncake", 128))


def test_a_file_of_another_format_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"tokens": [1, 2]}\n')
    with pytest.raises(TraceError, match=r"trace\.jsonl"):
        list(read_trace([path], "mooncake", 512))


def test_segments_of_the_own_format_share_what_they_share(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    head = '"t_ms": 0, "session": "s", "output_length": 5, "input_length": 1000'
    path.write_text(
        f'{{{head}, "segments": [["sys", 1, 600], ["text", "a", 0, 400]]}}\n'
        f'{{{head}, "segments": [["sys", 1, 600], ["text", "b", 0, 400]]}}\n'
        f'{{{head}, "segments": [["sys", 1, 600], ["text", "a", 0, 400]], "salt": "x"}}\n'
        f'{{{head}, "segments": [["sys", 1, 300], ["sys", 1, 300, 300], ["text", "b", 0, 400]]}}\n'
    )
    first, second, salted, joined = list(read_trace([path], "k3", 100))
    shared = [a == b for a, b in zip(first.digests, second.digests, strict=True)]
    assert shared == [True] * 6 + [False] * 4
    assert not set(first.digests) & set(salted.digests)
    assert len(joined.digests) == 10


def test_a_bounded_cache_never_does_better_than_an_unbounded_one() -> None:
    requests = _trace("mooncake_synthetic.jsonl.gz", "mooncake", 512)[:600]
    config = CacheConfig(unit_tokens=512, page_units=1, export_alignment=1)
    free = _replay(config, requests)
    bounded = CacheConfig(
        unit_tokens=512, page_units=1, export_alignment=1, memory="flat", num_pages=1500
    )
    tight = replay(bounded, requests)
    assert 0 < tight.hit_rate < free.hit_rate
    assert tight.evictions["units"] > 0
