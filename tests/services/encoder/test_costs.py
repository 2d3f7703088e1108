import pytest

from k3_encoder.costs import NO_WORK, Answer, Costs


def test_a_hit_saves_what_a_picture_of_its_size_takes_however_small_the_others_are() -> None:
    costs = Costs("encoder-1")
    for _ in range(10):
        for num_tokens in (4, 4, 4, 1000):
            costs.learn(num_tokens, 5_000_000 + 20_000 * num_tokens)
    spent_ns = 1_000_000
    answer = Answer(
        detail="local",
        is_kept=True,
        work=NO_WORK,
        num_tokens=1000,
        size_bytes=1,
        start_unix_ns=1,
        spent_ns=spent_ns,
    )
    assert costs.report(answer).saved_ns == pytest.approx(25_000_000 - spent_ns, rel=0.1)
    assert costs.tokens_per_s == pytest.approx(1012 / 0.04024, rel=0.2)
