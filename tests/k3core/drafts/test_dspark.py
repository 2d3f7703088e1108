"""The block draft: rounds with a cache are the dense form; the block is no causal one."""

import torch
from support.random_drafts import dspark_config, random_dspark, sequences, with_yarn

from k3core.drafts.dspark import DSparkDraft
from k3core.drafts.rounds import Committed, Pick

NUM_TAPS = 2


def told(ids: torch.Tensor) -> Pick:
    """Picks the given tokens whatever the logits say."""
    left = iter(ids)
    return lambda _: next(left)


def run_rounds(draft: DSparkDraft) -> None:
    drawn = sequences(NUM_TAPS)
    taps, ids = drawn.taps[1], drawn.token_ids[1]
    anchors = [1, 3, 4, 10]
    dense = draft.blocks(drawn.taps, drawn.token_ids, torch.tensor([[5, 5, 5, 5], anchors]))
    cache = draft.new_cache(len(ids))
    before = 0
    for index, anchor in enumerate(anchors):
        committed = Committed(taps[before:anchor], ids[before + 1 : anchor + 1])
        proposal = draft.draft(cache, committed, pick=told(ids[anchor + 1 : anchor + 6]))
        assert cache.length == anchor
        torch.testing.assert_close(proposal.logits, dense.logits[1, index], atol=1e-5, rtol=1e-5)
        assert proposal.confidence is not None
        wanted = dense.confidence_logits[1, index].sigmoid()
        torch.testing.assert_close(proposal.confidence, wanted, atol=1e-5, rtol=1e-5)
        before = anchor


def test_rounds_with_a_cache_give_what_the_dense_form_gives() -> None:
    run_rounds(random_dspark())


def test_rounds_agree_with_stretched_frequencies_too() -> None:
    plain, stretched = random_dspark(), random_dspark(with_yarn(dspark_config()))
    run_rounds(stretched)
    drawn, anchors = sequences(NUM_TAPS), torch.tensor([[9], [9]])
    of_plain = plain.blocks(drawn.taps, drawn.token_ids, anchors).logits
    of_stretched = stretched.blocks(drawn.taps, drawn.token_ids, anchors).logits
    assert not torch.allclose(of_plain, of_stretched, atol=1e-3)


def test_inside_the_block_everyone_sees_everyone() -> None:
    """A longer block changes even the first position, which a causal block would not."""
    draft, drawn = random_dspark(), sequences(NUM_TAPS)
    committed = Committed(drawn.taps[0, :6], drawn.token_ids[0, 1:7])
    short = draft.draft(draft.new_cache(20), committed, num_tokens=2)
    long = draft.draft(draft.new_cache(20), committed, num_tokens=5)
    assert not torch.allclose(short.logits[0], long.logits[0], atol=1e-4)


def test_the_anchor_reaches_every_position_and_later_tokens_only_through_the_chain() -> None:
    draft, drawn = random_dspark(), sequences(NUM_TAPS)
    anchors, ids = torch.tensor([[6], [6]]), drawn.token_ids.clone()
    before = draft.blocks(drawn.taps, ids, anchors)
    ids[:, 8] = (ids[:, 8] + 1) % 50
    after = draft.blocks(drawn.taps, ids, anchors)
    changed = (before.logits - after.logits).abs().amax((0, 1, 3)) > 0
    assert changed.tolist() == [False, False, True, False, False]
    ids[:, 6] = (ids[:, 6] + 1) % 50
    moved = (after.logits - draft.blocks(drawn.taps, ids, anchors).logits).abs()
    assert (moved.amax((0, 1, 3)) > 0).all()


def test_the_chain_adds_what_the_token_before_says() -> None:
    draft, drawn = random_dspark(), sequences(NUM_TAPS)
    committed = Committed(drawn.taps[0, :6], drawn.token_ids[0, 1:7])
    one, other = torch.tensor([11, 12, 13, 14, 15]), torch.tensor([21, 12, 13, 14, 15])
    first = draft.draft(draft.new_cache(20), committed, pick=told(one))
    second = draft.draft(draft.new_cache(20), committed, pick=told(other))
    head = draft.markov_head
    said = head.markov_w2(head.markov_w1(other[:1]) - head.markov_w1(one[:1]))[0]
    torch.testing.assert_close(
        second.logits[1] - first.logits[1], said.float().detach(), atol=1e-5, rtol=1e-5
    )
    assert torch.equal(first.logits[0], second.logits[0])
    assert torch.equal(first.logits[2:], second.logits[2:])
    assert first.confidence is not None
    assert second.confidence is not None
    same = first.confidence == second.confidence
    assert same.tolist() == [True, False, True, True, True]


def test_taps_from_the_anchor_on_are_not_seen() -> None:
    draft, drawn = random_dspark(), sequences(NUM_TAPS)
    anchors, taps = torch.tensor([[6], [6]]), drawn.taps.clone()
    before = draft.blocks(taps, drawn.token_ids, anchors)
    taps[:, 6:] += 1
    after = draft.blocks(taps, drawn.token_ids, anchors)
    assert torch.equal(before.logits, after.logits)
    taps[:, 5] += 1
    assert not torch.allclose(before.logits, draft.blocks(taps, drawn.token_ids, anchors).logits)


def test_confidence_is_a_probability_of_hidden_row_and_token() -> None:
    draft, drawn = random_dspark(), sequences(NUM_TAPS)
    committed = Committed(drawn.taps[0, :6], drawn.token_ids[0, 1:7])
    confidence = draft.draft(draft.new_cache(20), committed).confidence
    assert confidence is not None
    assert confidence.shape == (5,)
    assert confidence.dtype == torch.float32
    assert ((confidence > 0) & (confidence < 1)).all()


def test_every_parameter_learns_and_the_targets_tables_do_not() -> None:
    draft, drawn = random_dspark(), sequences(NUM_TAPS)
    output = draft.blocks(drawn.taps, drawn.token_ids, torch.tensor([[3, 8], [1, 12]]))
    (output.logits.logsumexp(-1).sum() + output.confidence_logits.sum()).backward()
    still = [k for k, p in draft.named_parameters() if p.grad is None or not p.grad.any()]
    assert still == []
    assert not {k for k in draft.state_dict() if k.startswith(("embed", "lm_head"))}
