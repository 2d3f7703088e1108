import random

import pytest

from k3core.engine.costs import StepCosts, StepFit, num_pairs

CHUNK = 512


def law_s(tokens: int, pairs: int) -> float:
    return 8e-3 + 1e-4 * tokens + 5e-8 * pairs


def serve(fit: StepFit, num_tokens: int, noise: float = 1.0) -> float:
    """Computes a prompt cold, chunk by chunk; what it took."""
    total = 0.0
    for start in range(0, num_tokens, CHUNK):
        length = min(CHUNK, num_tokens - start)
        pairs = num_pairs(start, length)
        seconds = law_s(length, pairs) * noise
        fit.learn(length, pairs, seconds)
        total += seconds
    return total


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_cold_prompts_of_any_length_take_what_is_predicted(noise: float) -> None:
    draw = random.Random(5)
    fit = StepFit(CHUNK)
    for _ in range(200):
        serve(fit, int(2 ** draw.uniform(4, 13)), draw.uniform(1 - noise, 1 + noise))
    for num_tokens in (1, 40, 127, 513, 1000, 8000):
        assert fit.costs.predict_s(0, num_tokens) == pytest.approx(
            serve(StepFit(CHUNK), num_tokens), rel=0.05 if not noise else 0.2
        )


def test_short_last_steps_do_not_make_long_ones_dear() -> None:
    fit = StepFit(CHUNK)
    for _ in range(20):
        took_s = serve(fit, CHUNK + 1)
    assert fit.costs.predict_s(0, CHUNK + 1) == pytest.approx(took_s, rel=0.05)
    assert fit.costs.predict_s(CHUNK, CHUNK + 1) == pytest.approx(law_s(1, CHUNK + 1), rel=0.1)


def test_before_there_are_two_kinds_of_steps_the_token_bears_the_cost() -> None:
    fit = StepFit(CHUNK)
    assert fit.costs == StepCosts(chunk_tokens=CHUNK)
    took_s = serve(fit, 100)
    assert fit.costs.predict_s(0, 100) == pytest.approx(took_s)
    assert fit.costs.predict_s(0, 200) == pytest.approx(2 * took_s)


def test_a_thousand_short_prompts_do_not_make_a_long_one_forgotten() -> None:
    draw = random.Random(6)
    fit = StepFit(CHUNK)
    took_s = serve(fit, 8000)
    for _ in range(1000):
        serve(fit, draw.randrange(1, 100), draw.uniform(0.7, 1.3))
    assert fit.costs.predict_s(0, 8000) == pytest.approx(took_s, rel=0.1)


def test_a_step_that_was_held_up_counts_little_and_a_slower_machine_soon() -> None:
    fit = StepFit(CHUNK)
    for num_tokens in (30, 300, 3000) * 10:
        serve(fit, num_tokens)
    expected_s = fit.costs.predict_s(0, 300)
    serve(fit, 300, noise=50.0)
    assert fit.costs.predict_s(0, 300) == pytest.approx(expected_s, rel=0.1)
    for num_tokens in (30, 300, 3000) * 25:
        serve(fit, num_tokens, noise=2.0)
    assert fit.costs.predict_s(0, 300) == pytest.approx(2 * expected_s, rel=0.1)


def test_no_more_of_a_prompt_costs_less_whatever_was_measured() -> None:
    draw = random.Random(7)
    for _ in range(100):
        fit = StepFit(CHUNK)
        for _ in range(draw.randrange(1, 12)):
            length = draw.randrange(1, CHUNK)
            pairs = num_pairs(draw.choice((0, 0, 40, 9000)), length)
            fit.learn(length, pairs, 10 ** draw.uniform(-4, 0))
        costs = fit.costs
        assert min(costs.step_s, costs.token_s, costs.pair_s) >= 0.0
        assert costs.predict_s(0, 900) > 0.0
        assert costs.predict_s(0, 900) >= costs.predict_s(200, 900) >= costs.predict_s(899, 900)
