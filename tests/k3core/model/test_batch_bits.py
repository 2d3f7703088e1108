"""What compiled kernels promise of a whole model: a request's logits ignore its batch, bit for bit."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from support.golden_model import golden, micro_model
from support.paged_arena import ArenaShape, build_views

from k3core.batch import CacheViews, ForwardBatch

SHAPE = ArenaShape(num_pages=64, unit_tokens=4, page_units=3, num_groups=2)
UNITS_EACH = 12
# Chunks of each of four sequences, step by step; the last two steps are pure decode.
STEPS = [(1, 30, 7, 2), (9, 1, 1, 20), (1, 1, 1, 1), (1, 1, 1, 1)]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def _views() -> CacheViews:
    return build_views(golden().config.text, SHAPE)


def _step(views: CacheViews, rows: list[int], counts: list[int], done: list[int]) -> torch.Tensor:
    """Logits of every token; sequence i always has the same tokens, units and pages."""
    starts = (0, *itertools.accumulate(counts))
    tables = [[96 + i * UNITS_EACH + j for j in range(UNITS_EACH)] for i in rows]
    # Odd multipliers give each sequence a text of its own.
    ids = [
        torch.arange(done[i], done[i] + n) * (2 * i + 3) % 200 + 10
        for i, n in zip(rows, counts, strict=True)
    ]
    batch = ForwardBatch(
        token_ids=torch.cat(ids),
        query_starts=starts,
        context_lengths=tuple(done[i] for i in rows),
        unit_tables=torch.tensor(tables, dtype=torch.int32),
        state_pages=torch.tensor([[2 * i, 2 * i + 1] for i in rows], dtype=torch.int32),
        logits_rows=tuple(range(starts[-1])),
    )
    return micro_model("cpu-native")(batch, views).logits


def test_logits_alone_and_in_a_batch_have_the_same_bits() -> None:
    together, alone = _views(), [_views() for _ in STEPS[0]]
    done = [0] * len(STEPS[0])
    for counts in STEPS:
        batched = _step(together, list(range(len(counts))), list(counts), done)
        for i, share in enumerate(batched.split(counts)):
            assert torch.equal(_step(alone[i], [i], [counts[i]], done), share)
        done = [before + count for before, count in zip(done, counts, strict=True)]
