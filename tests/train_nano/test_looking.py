"""Where attention is told to look, and the loss that says so."""

import torch

from k3core.kernels.training import training_kernels
from train_nano.looking import Looks, sources
from train_nano.model import build_nano

TEXT = [7, 1, 2, 30, 9, 3, 1, 2, 31, 9, 4, 1, 2, 30]


def test_a_token_is_looked_for_where_it_stood_after_the_longest_run_of_the_same_words() -> None:
    told = [5, 8, 1, 2, 30, 6, 8, 3, 1, 2, 30, 4, 8, 1, 2, 30]
    assert sources(told, 15) == [4], "four tokens alike against three"


def test_of_runs_as_long_the_latest_stands_first() -> None:
    assert sources([1, 2, 30, 5, 1, 2, 30, 6, 1, 2, 30], 10) == [6, 2]


def test_what_never_stood_there_or_stood_after_one_like_token_only_has_no_source() -> None:
    assert sources([1, 2, 3, 4], 3) == []
    assert sources([9, 2, 30, 5, 1, 2, 30], 6) == []


def test_the_loss_falls_as_the_taught_head_looks_there_and_reaches_its_projections() -> None:
    looks = Looks()
    nano = build_nano(1, lambda base: looks.recording(training_kernels()))
    mla = {
        name: p
        for name, p in nano.named_parameters().items()
        if name.endswith(("q_b_proj", "kv_b_proj"))
    }
    for parameter in mla.values():
        parameter.requires_grad_(True)
    ids = torch.tensor([TEXT])
    losses: list[float] = []
    for _ in range(12):
        nano.text.forward_dense(ids, None, None, logits_rows=torch.tensor([0]))
        loss = looks.loss(ids, [(0, 13)])
        losses.append(loss.item())
        grads = torch.autograd.grad(loss, list(mla.values()))
        for parameter, grad in zip(mla.values(), grads, strict=True):
            assert grad.abs().sum() > 0
            parameter.data -= 0.5 * grad
    assert losses[-1] < 0.5 * losses[0]


def test_without_a_source_there_is_nothing_to_learn_and_nothing_is_kept() -> None:
    looks = Looks()
    nano = build_nano(1, lambda base: looks.recording(training_kernels()))
    nano.text.embed.requires_grad_(True)
    ids = torch.tensor([TEXT])
    nano.text.forward_dense(ids, None, None, logits_rows=torch.tensor([0]))
    assert looks.seen
    assert looks.loss(ids, [(0, 1)]).item() == 0
    assert not looks.seen
