"""The EAGLE head: its round with a cache is its dense form, step after step."""

import pytest
import torch
from support.random_drafts import eagle_config, random_eagle, sequences
from torch.nn import functional as F

from k3core.drafts.rounds import Committed, Pick

NUM_TAPS = 3
TOLERANCE = 1e-10
"""float64 on both sides; the sums run in another order."""


def told(ids: torch.Tensor) -> Pick:
    """Picks the given tokens whatever the logits say."""
    left = iter(ids)
    return lambda _: next(left)


def test_rounds_with_a_cache_give_what_the_dense_form_gives() -> None:
    draft, drawn = random_eagle(), sequences(NUM_TAPS)
    taps, ids = drawn.taps[1], drawn.token_ids[1]
    anchors = [1, 2, 7, 11]
    dense = draft.unroll(drawn.taps, drawn.token_ids, torch.tensor([[3, 3, 3, 3], anchors]))[1]
    cache = draft.new_cache(len(ids) + 4)
    before = 0
    for index, anchor in enumerate(anchors):
        committed = Committed(taps[before:anchor], ids[before + 1 : anchor + 1])
        proposal = draft.draft(cache, committed, pick=told(ids[anchor + 1 : anchor + 5]))
        assert cache.length == anchor
        assert proposal.logits.dtype == torch.float32
        torch.testing.assert_close(proposal.logits, dense[index], atol=1e-5, rtol=1e-5)
        assert proposal.token_ids.tolist() == ids[anchor + 1 : anchor + 5].tolist()
        before = anchor


def test_a_greedy_round_feeds_its_own_tokens_back() -> None:
    draft, drawn = random_eagle(), sequences(NUM_TAPS)
    taps, ids = drawn.taps[0], drawn.token_ids[0].clone()
    anchor = 6
    proposal = draft.draft(draft.new_cache(30), Committed(taps[:anchor], ids[1 : anchor + 1]))
    assert torch.equal(proposal.token_ids, proposal.logits.argmax(-1))
    ids[anchor + 1 : anchor + 5] = proposal.token_ids
    dense = draft.unroll(taps[None], ids[None], torch.tensor([[anchor]]))[0, 0]
    torch.testing.assert_close(proposal.logits, dense, atol=1e-5, rtol=1e-5)


def test_fewer_tokens_are_a_prefix_of_more() -> None:
    draft, drawn = random_eagle(), sequences(NUM_TAPS)
    committed = Committed(drawn.taps[0, :5], drawn.token_ids[0, 1:6])
    whole = draft.draft(draft.new_cache(30), committed)
    short = draft.draft(draft.new_cache(30), committed, num_tokens=2)
    assert torch.equal(short.token_ids, whole.token_ids[:2])


def test_no_draft_sees_what_comes_after_its_anchor() -> None:
    draft, drawn = random_eagle(), sequences(NUM_TAPS)
    anchors = torch.tensor([[6], [6]])
    before = draft.unroll(drawn.taps, drawn.token_ids, anchors, 2)
    taps, ids = drawn.taps.clone(), drawn.token_ids.clone()
    taps[:, 6:] += 1
    ids[:, 8:] = (ids[:, 8:] + 1) % 50
    assert torch.equal(before, draft.unroll(taps, ids, anchors, 2))
    ids[:, 7] = (ids[:, 7] + 1) % 50
    after = draft.unroll(taps, ids, anchors, 2)
    assert torch.equal(before[:, :, 0], after[:, :, 0])
    assert not torch.allclose(before[:, :, 1], after[:, :, 1])


def test_the_first_draft_is_the_published_formula_written_out() -> None:
    draft, drawn = random_eagle(), sequences(NUM_TAPS)
    named = dict(draft.named_parameters())
    shape, attention = draft.config.shape, draft.config.shape.attention
    taps, ids, length = drawn.taps[0, :4], drawn.token_ids[0, 1:5], 4

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + shape.rms_norm_eps)
        return x * scale * named[f"{name}.weight"]

    def turned(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        powers = -torch.arange(0, attention.rope_dim, 2, dtype=torch.float64) / attention.rope_dim
        angles = torch.arange(length).unsqueeze(-1) * attention.rope_theta**powers
        while angles.ndim < pairs.ndim:
            angles = angles.unsqueeze(1)
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    fused = [norm(t, f"fc_norm.{i}") for i, t in enumerate(taps.split(shape.hidden_size, -1))]
    hidden = torch.cat(fused, -1) @ named["fc.weight"].T
    room = "layers.0."
    embeds = F.embedding(ids, named["embed_tokens.weight"])
    x = torch.cat((norm(embeds, f"{room}input_layernorm"), norm(hidden, f"{room}hidden_norm")), -1)
    own = f"{room}self_attn."
    query = norm(x @ named[f"{own}q_a_proj.weight"].T, f"{own}q_a_layernorm")
    query = (query @ named[f"{own}q_b_proj.weight"].T).unflatten(-1, (attention.num_heads, -1))
    q_plain, q_turned = query.split((attention.nope_dim, attention.rope_dim), -1)
    latent, shared = (x @ named[f"{own}kv_a_proj_with_mqa.weight"].T).split(
        (attention.kv_lora_rank, attention.rope_dim), -1
    )
    expanded = norm(latent, f"{own}kv_a_layernorm") @ named[f"{own}kv_b_proj.weight"].T
    keys, values = expanded.unflatten(-1, (attention.num_heads, -1)).split(
        (attention.nope_dim, attention.value_dim), -1
    )
    logits = torch.einsum("qnk,snk->nqs", q_plain, keys)
    logits = logits + torch.einsum("qnr,sr->nqs", turned(q_turned), turned(shared))
    logits = logits * attention.query_dim**-0.5
    logits = logits.masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
    mixed = torch.einsum("nqs,snv->qnv", logits.softmax(-1), values).flatten(-2)
    hidden = hidden + mixed @ named[f"{own}o_proj.weight"].T
    inner = norm(hidden, f"{room}post_attention_layernorm")
    gate = F.silu(inner @ named[f"{room}mlp.gate_proj.weight"].T)
    up = inner @ named[f"{room}mlp.up_proj.weight"].T
    hidden = hidden + (gate * up) @ named[f"{room}mlp.down_proj.weight"].T
    wanted = norm(hidden, "norm") @ named["lm_head.weight"].T
    got = draft.unroll(drawn.taps[:1], drawn.token_ids[:1], torch.tensor([[4]]), 1)
    torch.testing.assert_close(got[0, 0, 0], wanted[-1].float(), atol=1e-5, rtol=1e-5)


def test_every_parameter_learns() -> None:
    draft, drawn = random_eagle(), sequences(NUM_TAPS)
    logits = draft.unroll(drawn.taps, drawn.token_ids, torch.tensor([[3, 8], [1, 12]]))
    logits.logsumexp(-1).sum().backward()
    still = [k for k, p in draft.named_parameters() if p.grad is None or not p.grad.any()]
    assert still == []


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_the_config_says_how_many_are_drafted(num_tokens: int) -> None:
    draft, drawn = random_eagle(eagle_config(num_tokens)), sequences(NUM_TAPS)
    committed = Committed(drawn.taps[0, :5], drawn.token_ids[0, 1:6])
    proposal = draft.draft(draft.new_cache(30), committed)
    assert proposal.token_ids.shape == (num_tokens,)
    assert proposal.confidence is None
