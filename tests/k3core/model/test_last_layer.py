"""The last layer confines itself to the rows whose logits are wanted, and nobody can tell."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.paged_arena import ArenaShape, build_views
from support.random_model import layers, write_model

from k3core.batch import CacheViews, ForwardBatch, StateExport
from k3core.kernels.registry import select_kernels
from k3core.model.text import TextModel
from k3core.weights.config_file import load_config
from k3core.weights.loading import LoadOptions, load_text_model

SHAPE = ArenaShape(num_pages=40, unit_tokens=4, page_units=3, num_groups=1)
# What `k3core.model.text` promises: of the logits' scale.
TOLERANCE = 2e-5
# Chunks of a prompt, a decode row, a short draft and another prompt.
LENGTHS, CONTEXTS = (21, 1, 5, 12), (0, 0, 0, 0)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", params=["KMKM", "MKMK"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, layers(request.param))
    return directory


@pytest.fixture(params=["auto", "reference"])
def model(request: pytest.FixtureRequest, directory: Path) -> TextModel:
    device = torch.device("cpu")
    kernels = select_kernels(device, request.param)
    options = LoadOptions(device, torch.float32)
    return load_text_model(directory, load_config(directory), kernels, options)


def batch(
    wanted: tuple[int, ...], lengths: tuple[int, ...] = LENGTHS, done: tuple[int, ...] = CONTEXTS
) -> ForwardBatch:
    """One chunk of each sequence; sequence i has units 6 i .. 6 i + 5 and state page 30 + i."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    order = range(len(lengths))
    ids = [
        torch.arange(d, d + n) * (5 + 2 * i) for i, d, n in zip(order, done, lengths, strict=True)
    ]
    return ForwardBatch(
        token_ids=torch.cat(ids) % 200 + 10,
        query_starts=tuple(starts),
        context_lengths=done,
        unit_tables=torch.tensor([range(6 * i, 6 * i + 6) for i in order], dtype=torch.int32),
        state_pages=torch.tensor([[30 + i] for i in order], dtype=torch.int32),
        logits_rows=wanted,
        exports=(StateExport(0, 8, (38,)),) if lengths[0] >= 8 else (),
    )


def same_cache(left: CacheViews, right: CacheViews) -> bool:
    pools = ("latent", "recurrent", "conv")
    return all(
        torch.equal(a, b)
        for pool in pools
        for a, b in zip(getattr(left, pool), getattr(right, pool), strict=True)
    )


@pytest.mark.parametrize(
    "wanted",
    [(20, 21, 26, 38), (38,), (0,), (22, 23, 24, 25, 26), (3, 4, 5, 20, 27, 28), tuple(range(38))],
)
def test_wanted_rows_have_the_logits_they_have_among_all(
    model: TextModel, wanted: tuple[int, ...]
) -> None:
    few, all_rows = build_views(model.config, SHAPE), build_views(model.config, SHAPE)
    found = model(batch(wanted), few).logits
    truth = model(batch(tuple(range(sum(LENGTHS)))), all_rows).logits
    assert found.shape == (len(wanted), model.config.vocab_size)
    gap = (found - truth[list(wanted)]).abs().max()
    assert gap <= TOLERANCE * truth.abs().max()
    assert same_cache(few, all_rows)


def test_inner_chunks_leave_the_cache_that_the_last_one_needs(model: TextModel) -> None:
    views, whole = build_views(model.config, SHAPE), build_views(model.config, SHAPE)
    assert model(batch((), (9,), (0,)), views).logits.shape == (0, model.config.vocab_size)
    assert model(batch((), (7,), (9,)), views).logits.shape == (0, model.config.vocab_size)
    found = model(batch((4,), (5,), (16,)), views).logits
    truth = model(batch((20,), (21,), (0,)), whole).logits
    assert (found - truth).abs().max() <= TOLERANCE * truth.abs().max()


def test_taps_still_have_all_rows(model: TextModel) -> None:
    names = ("layer3.attn_out", "layer3.stream", "layer3.mixture")
    views = build_views(model.config, SHAPE)
    output = model(batch((20,)), views, names)
    assert {name: len(rows) for name, rows in output.taps.items()} == dict.fromkeys(
        names, sum(LENGTHS)
    )
    assert output.logits.shape == (1, model.config.vocab_size)
