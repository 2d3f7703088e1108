from array import array

import pytest

from k3core.cache.coordinator import PrefixCache
from k3core.cache.spec import CacheConfig
from k3core.engine.costs import StepCosts, num_pairs
from k3core.engine.live import Meter
from k3core.scheduler.plan import RowPlan, StepPlan
from k3core.scheduler.scheduler import Role, SchedulerConfig

CHUNK = 256


def step(*rows: tuple[int, int], is_decode: bool = False) -> StepPlan:
    """A step of rows, each (start, length)."""
    return StepPlan(
        step=1,
        rows=tuple(
            RowPlan(
                request_id=str(index),
                start=start,
                token_ids=array("i", [7] * length),
                is_decode=is_decode,
                wants_logits=True,
                units=array("i"),
                state_pages=(),
            )
            for index, (start, length) in enumerate(rows)
        ),
    )


def meter(role: Role) -> Meter:
    config = CacheConfig(unit_tokens=8, page_units=1, num_pages=40, export_alignment=1)
    return Meter(SchedulerConfig(role=role, chunk_tokens=(CHUNK,)), PrefixCache(config, b"test"))


def test_the_rate_is_tokens_over_seconds_however_short_the_last_steps_are() -> None:
    found = meter("prefill")
    for _ in range(30):
        found.measure(step((0, CHUNK)), 0.256)
        # A tail takes as long as ten tokens more: its own rate is an eleventh of the other's.
        found.measure(step((CHUNK, 1)), 0.011)
    found.publish((), 0.0, is_idle=True)
    assert found.load.tokens_per_s == pytest.approx(257 / 0.267, rel=0.1)
    predicted_s = found.load.costs.predict_s(0, CHUNK + 1)
    assert predicted_s == pytest.approx(0.267, rel=0.05)


def test_rows_of_one_step_share_its_cost_and_foreign_rows_teach_nothing() -> None:
    found = meter("prefill")
    for count in (1, 2, 4):
        rows = tuple((64 * index, 32) for index in range(count))
        pairs = sum(num_pairs(start, length) for start, length in rows)
        found.measure(step(*rows), 0.01 + 0.001 * 32 * count + 1e-6 * pairs)
    found.publish((), 0.0, is_idle=True)
    assert found.load.costs.predict_s(0, 64) == pytest.approx(0.01 + 0.064 + 0.002, rel=0.05)
    decode = meter("decode")
    decode.measure(step((10, 1), (20, 1), is_decode=True), 0.5)
    decode.publish((), 0.0, is_idle=True)
    assert decode.load.tokens_per_s == 4.0
    assert decode.load.costs == StepCosts(chunk_tokens=CHUNK)
    combined = meter("combined")
    mixed = step((0, 5)), step((9, 1), is_decode=True)
    combined.measure(StepPlan(step=2, rows=tuple(r for each in mixed for r in each.rows)), 0.5)
    combined.publish((), 0.0, is_idle=True)
    assert combined.load.tokens_per_s == 10.0
    assert combined.load.costs == StepCosts(chunk_tokens=CHUNK)
