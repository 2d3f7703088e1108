"""What drafts are trained on and how their acceptance is counted."""

from collections.abc import Callable
from functools import partial

import torch
from support.random_drafts import VOCAB, random_dspark, random_eagle, sequences
from torch import nn

from k3core.drafts.config import DSparkConfig, EagleConfig
from k3core.drafts.dspark import DSparkDraft
from k3core.drafts.eagle import EagleDraft
from k3core.drafts.rounds import Committed
from train_nano.draft_acceptance import Passage, play
from train_nano.draft_target import Watched
from train_nano.draft_training import ANCHORS_A_ROW, Rounds, dspark_loss, eagle_loss, rounds_of
from train_nano.optimiser import Optimiser

LEARNED = (range(4, 7), range(11, 17))
"""Spans that an assistant says, in a row of 19 tokens."""


def watched(num_taps: int) -> Watched:
    drawn = sequences(num_taps)
    is_learned = torch.zeros_like(drawn.token_ids, dtype=torch.bool)
    for row, span in enumerate(LEARNED):
        is_learned[row, list(span)] = True
    generator = torch.Generator().manual_seed(11)
    logits = 4 * torch.randn(*drawn.token_ids.shape, VOCAB, generator=generator)
    return Watched(drawn.token_ids, is_learned, drawn.taps, logits)


def test_rounds_start_before_said_tokens_and_count_to_their_end() -> None:
    seen = watched(3)
    rounds = rounds_of(seen, 4, seed=1)
    assert rounds.anchors.shape[1] <= ANCHORS_A_ROW
    for row, span in enumerate(LEARNED):
        found: set[int] = set()
        for anchor, weight, target in zip(
            rounds.anchors[row].tolist(), rounds.weight[row], rounds.target[row], strict=True
        ):
            drafted = [anchor + 1 + n in span for n in range(4)]
            if not weight.any():
                continue
            found.add(anchor)
            assert (weight > 0).tolist() == drafted
            for n in range(sum(drafted)):
                wanted = seen.logits[row, anchor + n].softmax(-1)
                torch.testing.assert_close(target[n], wanted)
        assert found == {place - 1 for place in span}


def test_a_row_in_which_nothing_is_said_weighs_nothing() -> None:
    seen = watched(3)
    seen.is_learned[0] = False
    rounds = rounds_of(seen, 4, seed=1)
    assert not rounds.weight[0].any()
    assert rounds.weight[1].any()


def falls(losses_of: Callable[[Watched, Rounds], torch.Tensor], draft: nn.Module) -> bool:
    """Whether a dozen steps bring a loss down by a fifth."""
    config = draft.config
    assert isinstance(config, EagleConfig | DSparkConfig)
    seen = watched(len(config.shape.taps.layers))
    optimiser = Optimiser(dict(draft.named_parameters()))
    losses: list[float] = []
    for step in range(12):
        loss = losses_of(seen, rounds_of(seen, config.shape.num_tokens, seed=step))
        loss.backward()
        optimiser.step(1.0)
        losses.append(loss.item())
    return losses[-1] < 0.8 * losses[0]


def test_steps_bring_both_drafts_nearer_to_the_target() -> None:
    eagle, block = random_eagle(), random_dspark()
    assert falls(partial(eagle_loss, eagle), eagle)
    assert falls(partial(dspark_loss, block), block)


def passage_of(draft: EagleDraft | DSparkDraft, num_prompt: int, num_rounds: int) -> Passage:
    """An answer that is the draft's own, round after round, each ended by a fixed token."""
    drawn = sequences(len(draft.config.shape.taps.layers), length=60)
    ids = drawn.token_ids[0].clone()
    count, cache = draft.config.shape.num_tokens, draft.new_cache(80)
    anchor = num_prompt
    for _ in range(num_rounds):
        before = cache.length
        committed = Committed(drawn.taps[0, before:anchor], ids[before + 1 : anchor + 1])
        ids[anchor + 1 : anchor + 1 + count] = draft.draft(cache, committed).token_ids
        anchor += count + 1
    names = draft.config.shape.taps.names
    taps = dict(zip(names, drawn.taps[0].chunk(len(names), dim=-1), strict=True))
    return Passage(ids[: anchor + 1], num_prompt, taps)


def test_drafts_that_are_the_answer_are_all_accepted() -> None:
    for draft in (random_eagle(), random_dspark()):
        count = draft.config.shape.num_tokens
        tally = play(draft, [passage_of(draft, 5, 3)])
        assert tally.num_rounds == 3
        assert tally.tokens_per_verify == count + 1
        assert tally.accepted == tally.offered == [3] * count


def test_a_wrong_draft_ends_its_round_and_costs_those_after_it() -> None:
    draft = random_eagle()
    passage = passage_of(draft, 5, 1)
    passage.token_ids[5 + 2] = (passage.token_ids[5 + 2] + 1) % VOCAB
    tally = play(draft, [Passage(passage.token_ids[: 5 + 4], 5, passage.taps)])
    # One draft accepted, the target's own token, then a round of the one token that is left.
    assert tally.num_rounds == 2
    assert tally.num_tokens == 3
    assert tally.offered[:2] == [2, 1]
    assert tally.accepted[1:] == [0] * (len(tally.accepted) - 1)


def test_tallies_add_up() -> None:
    draft = random_dspark()
    one, other = passage_of(draft, 5, 3), passage_of(draft, 9, 2)
    both = play(draft, [one, other])
    summed = play(draft, [one])
    summed.add(play(draft, [other]))
    assert both.figures() == summed.figures()
    assert len(both.confidence) == draft.config.shape.num_tokens
