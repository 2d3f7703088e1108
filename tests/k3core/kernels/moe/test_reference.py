"""Routing and experts against loops over plain numbers."""

import math

import pytest
import torch

from k3core.config import RouterScore
from k3core.kernels.interface import Activation, ExpertWeights, RouterRule
from k3core.kernels.moe.reference import experts, route
from k3core.kernels.mxfp4.reference import dequantise, quantise
from k3core.kernels.situ.reference import activate

NUM_TOKENS, NUM_EXPERTS = 9, 12
SITU = Activation(beta=4.0, linear_beta=25.0)


def route_by_hand(logits: list[float], bias: list[float], rule: RouterRule) -> dict[int, float]:
    if rule.score == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    else:
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(logits) // rule.num_groups
    groups = [choice[g * size : (g + 1) * size] for g in range(rule.num_groups)]
    ranked = sorted(range(rule.num_groups), key=lambda g: -sum(sorted(groups[g])[-2:]))
    open_groups = set(ranked[: rule.groups_per_token])
    allowed = [e for e in range(len(logits)) if e // size in open_groups]
    chosen = sorted(allowed, key=lambda e: -choice[e])[: rule.experts_per_token]
    total = sum(scores[e] for e in chosen) if rule.renormalize else 1.0
    return {e: scores[e] / total * rule.scaling_factor for e in chosen}


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (6, 3), (12, 5)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_choice_and_weights_follow_the_rule(
    score: RouterScore, groups: tuple[int, int], renormalize: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=generator)
    bias = torch.randn(NUM_EXPERTS, generator=generator)
    rule = RouterRule(3, score, groups[0], groups[1], renormalize, 2.5)
    ids, weights = route(logits, bias, rule)
    for token in range(NUM_TOKENS):
        found = dict(zip(ids[token].tolist(), weights[token].tolist(), strict=True))
        wanted = route_by_hand(logits[token].tolist(), bias.tolist(), rule)
        assert found == pytest.approx(wanted, rel=1e-5)


def test_the_bias_moves_the_choice_but_not_the_weights() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    rule = RouterRule(1, "sigmoid", 1, 1, False, 1.0)
    ids, weights = route(logits, torch.tensor([9.0, 0.0, 0.0]), rule)
    assert ids.tolist() == [[0]]
    assert weights.tolist() == [[0.5]]


@pytest.mark.parametrize("is_packed", [True, False])
def test_experts_sum_their_chosen_tokens(is_packed: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    width, middle, group = 64, 32, 32
    w13 = torch.randn(NUM_EXPERTS, 2 * middle, width, generator=generator) / 8
    w2 = torch.randn(NUM_EXPERTS, width, middle, generator=generator) / 6
    weights = ExpertWeights(w13, None, w2, None, 0)
    if is_packed:
        packed = (*quantise(w13, group), *quantise(w2, group))
        weights = ExpertWeights(*packed, group)
        w13 = dequantise(packed[0], packed[1], group, torch.float32)
        w2 = dequantise(packed[2], packed[3], group, torch.float32)
    x = torch.randn(NUM_TOKENS, width, generator=generator)
    ids = torch.stack([torch.randperm(NUM_EXPERTS, generator=generator)[:3] for _ in x])
    share = torch.rand(NUM_TOKENS, 3, generator=generator)
    found = experts(x, ids, share, weights, SITU)
    for token in range(NUM_TOKENS):
        wanted = torch.zeros(width)
        for expert, weight in zip(ids[token].tolist(), share[token], strict=True):
            wanted += weight * (w2[expert] @ activate(w13[expert] @ x[token], SITU))
        assert torch.allclose(found[token], wanted, atol=1e-5)


def test_plain_experts_have_gradients() -> None:
    w13, w2 = (torch.randn(2, 4, 2).requires_grad_() for _ in range(2))
    w2 = torch.randn(2, 2, 2).requires_grad_()
    x = torch.randn(3, 2).requires_grad_()
    share = torch.rand(3, 1).requires_grad_()
    ids = torch.tensor([[0], [1], [0]])
    experts(x, ids, share, ExpertWeights(w13, None, w2, None, 0), SITU).sum().backward()
    assert all(tensor.grad is not None and tensor.grad.any() for tensor in (w13, w2, x, share))
