"""k3-nano answers as well from checkpoints that were rounded to INT8 ten times over."""

from functools import cache

import pytest
from support.shipped_model import NANO

from k3core.engine.local import LocalEngine, LocalRequest
from k3core.engine.parts import EngineSizes
from k3core.weights.config_file import load_config
from k3wire.messages.sampling import SamplingParams
from train_nano.evaluate import Evaluation
from train_nano.generations import Generations

UNIT = 4
SIZES = EngineSizes(arena_bytes=32 << 20, unit_tokens=UNIT, codec="int8")


@cache
def engine() -> LocalEngine:
    return LocalEngine(NANO, SIZES)


def asked(num_generations: int) -> Generations:
    placeholder = load_config(NANO).media_placeholder_token_id
    return Generations(engine(), UNIT, placeholder, num_generations)


def test_answers_after_ten_rounded_generations_are_as_right_as_plain_ones() -> None:
    plain, kept = asked(0), asked(10)
    restores = engine().cache_stats.restores
    # One skill reads a picture, the other copies words out of a call's result.
    for skill in ("count", "tool result"):
        before = Evaluation(NANO, 7, plain).measure(skill, 0.02)
        after = Evaluation(NANO, 7, kept).measure(skill, 0.02)
        low, high = before.interval
        assert low > 0.25, "a checkpoint that knows nothing cannot forget"
        assert low <= after.accuracy <= high
    assert engine().cache_stats.restores - restores == 8 * 10
    same = [a == b for a, b in zip(plain.answers, kept.answers, strict=True)]
    assert sum(same) >= 7, "rounding seldom changes a word"
    assert engine().cache_stats.donations == 0


def test_a_prompt_too_short_for_ten_generations_is_refused() -> None:
    request = LocalRequest(list(range(40)), SamplingParams(temperature=0.0, max_tokens=1))
    with pytest.raises(ValueError, match="40 tokens"):
        asked(10).generate_all([request])
