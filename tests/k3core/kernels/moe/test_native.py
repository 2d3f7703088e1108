"""Routing and experts, packed and plain, against the reference in float64."""

import pytest
import torch

from k3core.kernels.cpu_native import native_library
from k3core.kernels.interface import Activation, ExpertWeights, RouterRule
from k3core.kernels.moe import reference
from k3core.kernels.moe.native import NativeMoe
from k3core.kernels.mxfp4.reference import dequantise

SITU = Activation(4.0, 25.0)
# (tokens, experts, experts a token, L, F)
SIZES = [(1, 4, 2, 32, 64), (3, 16, 4, 64, 32), (70, 5, 3, 96, 160), (40, 200, 1, 32, 32)]


@pytest.fixture(scope="module")
def moe() -> NativeMoe:
    return NativeMoe(native_library())


def _draw(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def _packed(num_experts: int, width: int, middle: int, group: int = 32) -> ExpertWeights:
    generator = torch.Generator().manual_seed(3)

    def draw(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=generator, dtype=torch.uint8)

    return ExpertWeights(
        w13=draw(0, 256, num_experts, 2 * middle, width // 2),
        w13_scale=draw(118, 124, num_experts, 2 * middle, width // group),
        w2=draw(0, 256, num_experts, width, middle // 2),
        w2_scale=draw(118, 124, num_experts, width, middle // group),
        group=group,
    )


def _plain(num_experts: int, width: int, middle: int) -> ExpertWeights:
    return ExpertWeights(
        w13=_draw(num_experts, 2 * middle, width, seed=4) * 0.2,
        w13_scale=None,
        w2=_draw(num_experts, width, middle, seed=5) * 0.2,
        w2_scale=None,
        group=0,
    )


def _choice(num_tokens: int, num_experts: int, chosen: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = _draw(num_tokens, num_experts, seed=6).topk(chosen).indices
    return ids, torch.rand(num_tokens, chosen, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_packed", [True, False])
def test_experts_meet_float64(
    moe: NativeMoe, size: tuple[int, int, int, int, int], is_packed: bool
) -> None:
    num_tokens, num_experts, chosen, width, middle = size
    weights = (_packed if is_packed else _plain)(num_experts, width, middle)
    x = _draw(num_tokens, width + 4)[:, 2:-2]
    ids, shares = _choice(num_tokens, num_experts, chosen)
    truth = reference.experts(x.double(), ids, shares.double(), weights, SITU)
    out = moe.experts(x, ids, shares, weights, SITU)
    assert (out - truth).abs().max() <= 3e-6 * truth.abs().max()


def test_odd_widths_of_plain_experts_meet_float64(moe: NativeMoe) -> None:
    weights = _plain(3, 37, 45)
    x = _draw(9, 37)
    ids, shares = _choice(9, 3, 2)
    truth = reference.experts(x.double(), ids, shares.double(), weights, SITU)
    out = moe.experts(x, ids, shares, weights, SITU)
    assert (out - truth).abs().max() <= 3e-6 * truth.abs().max()


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 8])
def test_every_code_and_every_scale_is_unpacked_exactly(
    moe: NativeMoe, num_rows: int, group: int
) -> None:
    """One expert whose down rows pick single middle columns shows what was unpacked."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(1, 64, 1)[:, :, :16]
    codes = (codes + 16 * torch.arange(64, dtype=torch.uint8)[None, :, None]).contiguous()
    scales = torch.arange(96, 160, dtype=torch.uint8).reshape(1, 64, 1)
    scales = torch.cat([scales + i for i in range(32 // group)], dim=2)
    identity = torch.zeros(1, 32, 16, dtype=torch.uint8)
    for column in range(32):
        identity[0, column, column // 2] = 0x2 if column % 2 == 0 else 0x20
    ones = torch.full((1, 32, 32 // group), 127).byte()
    weights = ExpertWeights(codes, scales, identity, ones, group)
    truth = dequantise(codes[0], scales[0], group, torch.float64)
    silu = Activation(None, None)
    for column in range(32):
        x = torch.zeros(num_rows, 32)
        x[:, column] = 1.0
        first, one = torch.zeros(num_rows, 1, dtype=torch.long), torch.ones(num_rows, 1)
        out = moe.experts(x, first, one, weights, silu)
        gate, up = truth[:32, column], truth[32:, column]
        expected = gate * torch.sigmoid(gate) * up
        assert torch.allclose(out.double(), expected.expand(num_rows, -1), rtol=1e-6, atol=0)


def test_bfloat16_rows_and_weights_are_widened(moe: NativeMoe) -> None:
    plain = _plain(4, 64, 32)
    narrow = ExpertWeights(plain.w13.bfloat16(), None, plain.w2.bfloat16(), None, 0)
    wide = ExpertWeights(narrow.w13.float(), None, narrow.w2.float(), None, 0)
    x = _draw(11, 64).bfloat16()
    ids, shares = _choice(11, 4, 2)
    out = moe.experts(x, ids, shares, narrow, SITU)
    assert torch.equal(out, moe.experts(x.float(), ids, shares, wide, SITU).bfloat16())


# Rows of one chain and of several, of one pass and of two; groups smaller and larger than a word's.
WEIGHTS = {
    "packed": _packed(6, 64, 96),
    "packed in sixteens, long rows": _packed(6, 320, 160, group=16),
    "packed in sixty-fours": _packed(6, 192, 576, group=64),
    "plain": _plain(6, 64, 96),
    "plain, odd": _plain(6, 141, 277),
}


@pytest.mark.parametrize("name", list(WEIGHTS))
def test_a_token_has_the_same_bits_alone_and_in_any_batch(moe: NativeMoe, name: str) -> None:
    weights = WEIGHTS[name]
    # About 200 rows an expert, more than the kernel takes in one block.
    x = _draw(400, weights.w2.shape[1])
    ids, shares = _choice(400, 6, 3)
    together = moe.experts(x, ids, shares, weights, SITU)
    for first, count in ((0, 1), (13, 2), (20, 3), (25, 5), (40, 50)):
        rows = slice(first, first + count)
        alone = moe.experts(x[rows], ids[rows], shares[rows], weights, SITU)
        assert torch.equal(alone, together[rows]), count


@pytest.mark.parametrize("name", list(WEIGHTS))
def test_few_rows_of_one_expert_have_the_bits_of_many(moe: NativeMoe, name: str) -> None:
    weights = WEIGHTS[name]
    x = _draw(1, weights.w2.shape[1]).expand(13, -1).contiguous()
    ids, shares = torch.full((13, 1), 4), torch.ones(13, 1)
    together = moe.experts(x, ids, shares, weights, SITU)
    for count in range(1, 13):
        few = moe.experts(x[:count], ids[:count], shares[:count], weights, SITU)
        assert torch.equal(few, together[:1].expand(count, -1)), count


RULES = [
    RouterRule(4, "sigmoid", 1, 1, True, 1.0),
    RouterRule(3, "softmax", 1, 1, False, 2.5),
    RouterRule(4, "sigmoid", 4, 2, True, 1.0),
    RouterRule(1, "sigmoid", 1, 1, True, 1.0),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_routes_choose_and_weigh_as_the_reference(
    moe: NativeMoe, rule: RouterRule, has_bias: bool
) -> None:
    logits, bias = _draw(50, 20) * 2, _draw(20, seed=1) if has_bias else None
    truth_ids, truth_weights = reference.route(logits, bias, rule)
    ids, weights = moe.route(logits, bias, rule)
    order, truth_order = ids.argsort(-1), truth_ids.argsort(-1)
    assert torch.equal(ids.gather(1, order), truth_ids.gather(1, truth_order))
    difference = weights.gather(1, order) - truth_weights.gather(1, truth_order)
    assert difference.abs().max() <= 1e-6


def test_of_equal_scores_the_lower_ids_win(moe: NativeMoe) -> None:
    ids, weights = moe.route(torch.zeros(2, 9), None, RULES[0])
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert torch.equal(weights, torch.full((2, 4), 0.25))
