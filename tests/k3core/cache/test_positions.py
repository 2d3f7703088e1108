"""One function computes positions; whatever the chunks, what it names is reachable and reached."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3core.cache.positions import (
    StateClass,
    decode_targets,
    granularity,
    next_chunk,
    prompt_targets,
)
from k3core.cache.spec import CacheConfig, CacheError, Retention

_K3 = CacheConfig(unit_tokens=128, page_units=12, checkpoint_grid=1536)

configs = st.builds(
    CacheConfig,
    unit_tokens=st.just(8),
    checkpoint_grid=st.sampled_from([8, 24]),
    export_alignment=st.sampled_from([1, 8, 16]),
    export_mode=st.sampled_from(["in_pass", "align", "partial"]),
    partial_hits=st.booleans(),
    draft=st.sampled_from(["off", "drop"]),
    retention=st.sampled_from(
        [
            Retention(),
            Retention(prompt_end=False, unit_end=True),
            Retention(dense=True),
            Retention(intervals=(48,)),
            Retention(opportunistic=True),
        ]
    ),
)


def _chunks(config: CacheConfig, n: int, hit: int, junction: int, budgets: list[int]) -> list[int]:
    targets = prompt_targets(config, n, hit, junction, spare_states=4)
    start, exported, step = hit, list[int](), 0
    while start < n:
        budget = budgets[step % len(budgets)]
        chunk = next_chunk(config, start, budget, n, targets)
        assert start < chunk.end <= min(n, start + budget)
        for position in chunk.exports:
            assert start < position <= chunk.end
            assert position % granularity(config) == 0
            is_aligned = (position - start) % config.export_alignment == 0
            assert is_aligned or position == chunk.end
            if config.export_mode != "in_pass":
                assert position == chunk.end
        exported += chunk.exports
        start, step = chunk.end, step + 1
    return exported


@settings(max_examples=300, deadline=None)
@given(
    config=configs,
    n=st.integers(1, 400),
    hit_units=st.integers(0, 20),
    junction=st.integers(0, 500),
    budgets=st.lists(st.integers(1, 200), min_size=1, max_size=4),
)
def test_every_export_is_legal_whatever_the_budget(
    config: CacheConfig, n: int, hit_units: int, junction: int, budgets: list[int]
) -> None:
    hit = min(hit_units * 8, (n - 1) // 8 * 8)
    exported = _chunks(config, n, hit, junction, budgets)
    assert exported == sorted(set(exported))
    assert all(hit < position <= n for position in exported)


@settings(max_examples=200, deadline=None)
@given(
    n=st.integers(1, 400),
    first=st.lists(st.integers(8, 200), min_size=1, max_size=4),
    second=st.lists(st.integers(8, 200), min_size=1, max_size=4),
)
def test_positions_do_not_depend_on_the_budget_where_units_can_be_reached(
    n: int, first: list[int], second: list[int]
) -> None:
    config = CacheConfig(unit_tokens=8, checkpoint_grid=24, export_alignment=8)
    assert _chunks(config, n, 0, 40, first) == _chunks(config, n, 0, 40, second)


@pytest.mark.parametrize(
    ("draft", "n", "wanted"),
    [
        ("off", 5000, {4608, 4992}),
        ("off", 8000, {7680, 7936}),
        ("off", 3072, {1536, 2944, 3072}),
        ("drop", 5000, {4608, 4864}),
        ("drop", 100, set()),
        ("off", 128, {128}),
        ("off", 127, set()),
    ],
)
def test_prompt_end_names_the_last_grid_and_the_last_unit(
    draft: str, n: int, wanted: set[int]
) -> None:
    config = CacheConfig(checkpoint_grid=1536, draft="drop" if draft == "drop" else "off")
    assert set(prompt_targets(config, n, 0)) == wanted


def test_a_junction_beyond_the_prompt_is_floored_inside_it() -> None:
    config = CacheConfig(unit_tokens=32, checkpoint_grid=512, retention=Retention(prompt_end=False))
    assert set(prompt_targets(config, 2100, 0, junction=2208)) == {2080}
    assert prompt_targets(config, 2100, 0, junction=992) == {992: StateClass.JUNCTION}


def test_nothing_at_or_before_the_hit_is_written_again() -> None:
    assert set(prompt_targets(_K3, 5000, 4608)) == {4992}


def test_a_position_out_of_reach_moves_back_to_one_that_is_not() -> None:
    config = CacheConfig(unit_tokens=8, checkpoint_grid=8, export_alignment=16)
    targets = {88: StateClass.ENDPOINT}
    assert next_chunk(config, 0, 1000, 95, targets).exports == (80,)
    assert next_chunk(config, 8, 1000, 95, targets).exports == (88,)


def test_decode_keeps_what_its_rules_name() -> None:
    config = CacheConfig(unit_tokens=16, checkpoint_grid=64, retention=Retention(decode_grid=32))
    assert decode_targets(config, 60, 130) == (64, 96, 128)
    dense = CacheConfig(unit_tokens=16, checkpoint_grid=64, retention=Retention(dense=True))
    assert decode_targets(dense, 60, 130) == (64, 128)
    assert decode_targets(_K3, 60, 5000) == ()


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (CacheConfig(unit_tokens=16, page_units=1, retention=Retention(intervals=(24,))), "24"),
        (CacheConfig(unit_tokens=16, checkpoint_grid=24), "24"),
        (CacheConfig(path_cap=0), "path_cap"),
        (CacheConfig(unit_tokens=16, retention=Retention(decode_grid=20)), "20"),
        (CacheConfig(memory="two_pools"), "num_slots"),
        (CacheConfig(num_pages=0), "num_pages"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused(
    config: CacheConfig, named: str
) -> None:
    with pytest.raises(CacheError, match=named):
        config.check()
