import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3core.engine.sampler import SampleRow, sample
from k3wire.messages.sampling import SamplingParams


def params(**changes: object) -> SamplingParams:
    fields = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 8} | changes
    return SamplingParams(**fields)  # type: ignore[arg-type]  # fields by name, per test


def draw_many(logits: list[float], sampling: SamplingParams, count: int = 4000) -> list[float]:
    rows = [SampleRow(sampling, position) for position in range(count)]
    tokens = sample(torch.tensor([logits]).repeat(count, 1), rows)
    return [tokens.count(token) / count for token in range(len(logits))]


def test_greedy_takes_the_largest_logit() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, -1.0, 4.9]])
    rows = [SampleRow(params(temperature=0.0), 0), SampleRow(params(temperature=0.0), 4)]
    assert sample(logits, rows) == [1, 0]


def test_frequencies_follow_the_softmax() -> None:
    logits = [0.0, 1.0, 2.0, -1.0]
    expected = torch.tensor(logits).softmax(-1).tolist()
    assert draw_many(logits, params(seed=5)) == pytest.approx(expected, abs=0.03)


def test_temperature_flattens_or_sharpens() -> None:
    logits = [0.0, 1.0, 2.0]
    expected = (torch.tensor(logits) / 2.0).softmax(-1).tolist()
    assert draw_many(logits, params(temperature=2.0)) == pytest.approx(expected, abs=0.03)


def test_top_k_keeps_k_tokens_and_their_proportions() -> None:
    found = draw_many([0.0, 1.0, 2.0, 3.0], params(top_k=2))
    kept = torch.tensor([2.0, 3.0]).softmax(-1).tolist()
    assert found == pytest.approx([0.0, 0.0, *kept], abs=0.03)
    assert found[:2] == [0.0, 0.0]


def test_top_p_keeps_the_shortest_run_that_reaches_the_mass() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    found = draw_many(probabilities.log().tolist(), params(top_p=0.79))
    assert found == pytest.approx([0.625, 0.375, 0.0, 0.0], abs=0.03)
    assert found[2:] == [0.0, 0.0]


def test_min_p_is_relative_to_the_likeliest() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    found = draw_many(probabilities.log().tolist(), params(min_p=0.31))
    assert found[3] == found[2] == 0.0
    assert found[0] == pytest.approx(0.625, abs=0.03)


def test_top_p_counts_mass_within_what_top_k_left() -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    # Within the first two, the first holds 4/7 = 0.571 of the mass.
    found = draw_many(probabilities.log().tolist(), params(top_k=2, top_p=0.57))
    assert found == [1.0, 0.0, 0.0, 0.0]


def test_end_tokens_are_never_drawn_before_min_tokens() -> None:
    logits = torch.tensor([[9.0, 1.0, 0.0]]).repeat(2, 1)
    sampling = params(temperature=0.0, min_tokens=3, stop_token_ids=(0,))
    assert sample(logits, [SampleRow(sampling, 2), SampleRow(sampling, 3)]) == [1, 0]


def test_end_tokens_that_the_vocabulary_lacks_are_no_fault() -> None:
    sampling = params(temperature=0.0, min_tokens=3, stop_token_ids=(0, 70))
    assert sample(torch.tensor([[9.0, 1.0, 0.0]]), [SampleRow(sampling, 0)]) == [1]


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    logits = torch.tensor([[2.0, 1.5, 0.0]])
    presence = params(temperature=0.0, presence_penalty=0.6)
    frequency = params(temperature=0.0, frequency_penalty=0.3)
    assert sample(logits, [SampleRow(presence, 1, prompt_ids=(0,), output_ids=())]) == [0]
    assert sample(logits, [SampleRow(presence, 1, output_ids=(0,))]) == [1]
    assert sample(logits, [SampleRow(frequency, 1, output_ids=(0,))]) == [0]
    assert sample(logits, [SampleRow(frequency, 2, output_ids=(0, 0))]) == [1]


def test_repetition_penalty_covers_the_prompt_and_either_sign() -> None:
    sampling = params(temperature=0.0, repetition_penalty=2.0)
    assert sample(torch.tensor([[2.0, 1.5]]), [SampleRow(sampling, 0, prompt_ids=(0,))]) == [1]
    assert sample(torch.tensor([[-1.0, -1.5]]), [SampleRow(sampling, 0, prompt_ids=(0,))]) == [1]


def test_the_logits_handed_in_are_left_alone() -> None:
    logits = torch.randn(3, 50)
    before = logits.clone()
    sampling = params(presence_penalty=1.0, min_tokens=9, stop_token_ids=(1,), top_p=0.5)
    sample(logits, [SampleRow(sampling, 2, output_ids=(4, 4))] * 3)
    assert torch.equal(logits, before)


sampling_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.05, 0.5, 0.95, 1.0]),
    top_k=st.sampled_from([0, 1, 7, 1000]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.just(8),
    min_tokens=st.sampled_from([0, 4]),
    stop_token_ids=st.sampled_from([(), (3, 11)]),
    presence_penalty=st.sampled_from([0.0, 0.9]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.builds(
            SampleRow,
            sampling=sampling_strategy,
            position=st.integers(0, 9),
            prompt_ids=st.just((1, 2, 3)),
            output_ids=st.sampled_from([(), (5, 5, 8)]),
        ),
        min_size=2,
        max_size=9,
    ),
    seed=st.integers(0, 1000),
)
def test_a_row_gets_in_company_what_it_gets_alone(rows: list[SampleRow], seed: int) -> None:
    logits = torch.randn(len(rows), 700, generator=torch.Generator().manual_seed(seed)) * 3
    together = sample(logits, rows)
    alone = [sample(logits[index : index + 1], [row])[0] for index, row in enumerate(rows)]
    assert together == alone
    for row, token in zip(rows, together, strict=True):
        if row.position < row.sampling.min_tokens:
            assert token not in row.sampling.stop_token_ids
