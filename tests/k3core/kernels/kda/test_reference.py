"""The plain token loop against the equations written out in float64, head by head."""

import math

import pytest
import torch

from k3core.kernels.interface import KdaInputs, KdaPlan, KdaStates, KdaWeights
from k3core.kernels.kda import reference

HEADS, KEY, VALUE, TAPS, LENGTH = 3, 5, 4, 4, 9
CHANNELS = HEADS * (2 * KEY + VALUE)


def make(bound: float | None) -> tuple[KdaInputs, KdaWeights]:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    inputs = KdaInputs(draw(LENGTH, CHANNELS), draw(LENGTH, HEADS, KEY), draw(LENGTH, HEADS))
    return inputs, KdaWeights(draw(CHANNELS, TAPS), draw(HEADS), draw(HEADS, KEY), bound)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def by_hand(inputs: KdaInputs, weights: KdaWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [T, H, V] and the final state [H, V, K]."""
    out = torch.zeros(LENGTH, HEADS, VALUE, dtype=torch.float64)
    state = torch.zeros(HEADS, KEY, VALUE, dtype=torch.float64)
    for t in range(LENGTH):
        mixed = torch.zeros(CHANNELS, dtype=torch.float64)
        for back in range(min(TAPS, t + 1)):
            mixed += inputs.qkv[t - back] * weights.conv[:, TAPS - 1 - back]
        mixed = mixed * torch.tensor([sigmoid(x) for x in mixed.tolist()])
        for h in range(HEADS):
            q = mixed[h * KEY : (h + 1) * KEY]
            k = mixed[HEADS * KEY + h * KEY :][:KEY]
            v = mixed[2 * HEADS * KEY + h * VALUE :][:VALUE]
            q = q / math.sqrt(float(q @ q) + 1e-6) / math.sqrt(KEY)
            k = k / math.sqrt(float(k @ k) + 1e-6)
            rate = math.exp(float(weights.a_log[h]))
            for channel in range(KEY):
                z = float(inputs.gate[t, h, channel] + weights.dt_bias[h, channel])
                bound = weights.lower_bound
                g = -rate * math.log1p(math.exp(z)) if bound is None else bound * sigmoid(rate * z)
                state[h, channel] *= math.exp(g)
            error = v - state[h].T @ k
            state[h] += torch.outer(k, sigmoid(float(inputs.beta[t, h])) * error)
            out[t, h] = state[h].T @ q
    return out, state.transpose(-1, -2)


def plan_for(length: int, has_state: bool, exports: tuple[tuple[int, int, int], ...]) -> KdaPlan:
    return KdaPlan(
        starts=(0, length),
        has_state=(has_state,),
        pages=(1,),
        page_ids=torch.tensor([1]),
        state_mask=torch.tensor([has_state]),
        exports=exports,
    )


def states() -> KdaStates:
    rubbish = torch.full((3, HEADS, VALUE, KEY), 9.0, dtype=torch.float64)
    return KdaStates(rubbish, torch.full((3, TAPS - 1, CHANNELS), 9.0, dtype=torch.float64))


def rows(inputs: KdaInputs, low: int, high: int) -> KdaInputs:
    return KdaInputs(inputs.qkv[low:high], inputs.gate[low:high], inputs.beta[low:high])


@pytest.mark.parametrize("bound", [-5.0, -1.5, None])
def test_prefill_follows_the_equations(bound: float | None) -> None:
    inputs, weights = make(bound)
    wanted, final = by_hand(inputs, weights)
    pools = states()
    found = reference.prefill(inputs, weights, plan_for(LENGTH, False, ()), pools)
    assert torch.allclose(found, wanted, atol=1e-12)
    assert torch.allclose(pools.recurrent[1], final, atol=1e-12)
    assert torch.equal(pools.conv[1], inputs.qkv[-(TAPS - 1) :])
    assert (pools.recurrent[[0, 2]] == 9).all()


@pytest.mark.parametrize("bound", [-5.0, None])
def test_chunks_decode_steps_and_exports_join_up(bound: float | None) -> None:
    inputs, weights = make(bound)
    wanted, final = by_hand(inputs, weights)
    pools = states()
    first = reference.prefill(
        rows(inputs, 0, 4), weights, plan_for(4, False, ((0, 2, 0), (0, 4, 2))), pools
    )
    assert torch.equal(pools.recurrent[2], pools.recurrent[1])
    assert torch.equal(pools.conv[0, 1:], inputs.qkv[:2])
    assert not pools.conv[0, 0].any()
    steps = [
        reference.decode(rows(inputs, t, t + 1), weights, plan_for(1, True, ()), pools)
        for t in range(4, LENGTH)
    ]
    assert torch.allclose(torch.cat([first, *steps]), wanted, atol=1e-12)
    assert torch.allclose(pools.recurrent[1], final, atol=1e-12)


def test_dense_is_prefill_without_pages_and_differentiable() -> None:
    inputs, weights = make(-5.0)
    wanted, _ = by_hand(inputs, weights)
    batched = KdaInputs(*(x.unsqueeze(0) for x in (inputs.qkv, inputs.gate, inputs.beta)))
    assert torch.allclose(reference.dense(batched, weights)[0], wanted, atol=1e-12)
    leaf = batched.qkv.detach().requires_grad_()
    reference.dense(KdaInputs(leaf, batched.gate, batched.beta), weights).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.abs().sum(-1).all()
