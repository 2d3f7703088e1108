"""Mixed batches over an awkward arena: units in any order, states exported and taken up again."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from support.golden_model import golden, micro_model
from support.paged_arena import ArenaShape, build_views

from k3core.batch import CacheViews, ForwardBatch, StateExport

SHAPE = ArenaShape(num_pages=120, unit_tokens=4, page_units=3, num_groups=2)
# What `k3core.model.text` promises, at this model's scale of logits, 4.8.
TOLERANCE = 2e-5 * 4.8


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@dataclass
class Sequence:
    """A test sequence: its tokens, units in shuffled order and live state pages."""

    token_ids: torch.Tensor
    units: list[int]
    pages: list[int]
    num_done: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)


class Bench:
    """Hands out pages of one arena and runs batches of test sequences."""

    def __init__(self, kernels: str, seed: int) -> None:
        self.model = micro_model(kernels)
        self.views: CacheViews = build_views(golden().config.text, SHAPE)
        self.random = random.Random(seed)
        pages = list(range(SHAPE.num_pages))
        self.random.shuffle(pages)
        self.free_pages = pages
        self.free_units = [
            page * SHAPE.page_units + place
            for page in (self.free_pages.pop() for _ in range(60))
            for place in range(SHAPE.page_units)
        ]
        self.random.shuffle(self.free_units)

    def new(self, token_ids: torch.Tensor) -> Sequence:
        num_units = -(-len(token_ids) // SHAPE.unit_tokens)
        units = [self.free_units.pop() for _ in range(num_units)]
        return Sequence(token_ids, units, self.new_state())

    def new_state(self) -> list[int]:
        return [self.free_pages.pop() for _ in range(SHAPE.num_groups)]

    def step(self, work: list[tuple[Sequence, int]], exports: tuple[StateExport, ...] = ()) -> None:
        """Feed the next `n` tokens of each sequence in one pass."""
        starts = [0]
        for _, count in work:
            starts.append(starts[-1] + count)
        tables = torch.zeros(len(work), max(len(s.units) for s, _ in work), dtype=torch.int32)
        for row, (sequence, _) in enumerate(work):
            tables[row, : len(sequence.units)] = torch.tensor(sequence.units)
        batch = ForwardBatch(
            token_ids=torch.cat([s.token_ids[s.num_done : s.num_done + n] for s, n in work]),
            query_starts=tuple(starts),
            context_lengths=tuple(s.num_done for s, _ in work),
            unit_tables=tables,
            state_pages=torch.tensor([s.pages for s, _ in work], dtype=torch.int32),
            logits_rows=tuple(range(starts[-1])),
            exports=exports,
        )
        logits = self.model(batch, self.views).logits
        for row, (sequence, count) in enumerate(work):
            sequence.logits.append(logits[starts[row] : starts[row + 1]])
            sequence.num_done += count


def tokens(seed: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(6, golden().config.text.vocab_size, (length,), generator=generator)


def alone(kernels: str, token_ids: torch.Tensor) -> torch.Tensor:
    bench = Bench(kernels, seed=1)
    sequence = bench.new(token_ids)
    bench.step([(sequence, len(token_ids))])
    return sequence.logits[0]


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_sequence_in_any_mixed_batch_gets_what_it_gets_alone(kernels: str, seed: int) -> None:
    bench = Bench(kernels, seed)
    sequences = [bench.new(tokens(10 + i, n)) for i, n in enumerate((37, 1, 23, 50, 9))]
    while pending := [s for s in sequences if s.num_done < len(s.token_ids)]:
        bench.random.shuffle(pending)
        work = [
            (s, min(bench.random.choice((1, 1, 2, 9, 17)), len(s.token_ids) - s.num_done))
            for s in pending[: bench.random.randint(1, len(pending))]
        ]
        bench.step(work)
    for sequence in sequences:
        found, wanted = torch.cat(sequence.logits), alone(kernels, sequence.token_ids)
        assert (found - wanted).abs().max() <= TOLERANCE
        assert torch.equal(found.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_an_exported_state_continues_like_the_run_it_was_taken_from(kernels: str) -> None:
    bench = Bench(kernels, seed=3)
    ids = tokens(20, 40)
    source, other = bench.new(ids), bench.new(tokens(21, 11))
    bench.step([(other, 4), (source, 5)])
    offsets = (1, 2, 3, 17, 35)
    states = [bench.new_state() for _ in offsets]
    exports = tuple(
        StateExport(row=0, offset=offset, pages=tuple(pages))
        for offset, pages in zip(offsets, states, strict=True)
    )
    bench.step([(source, 35), (other, 7)], exports)
    wanted = torch.cat(source.logits)
    for offset, pages in zip(offsets, states, strict=True):
        position = 5 + offset
        if position == len(ids):
            for view in (*bench.views.recurrent, *bench.views.conv):
                assert view.shape[0] == SHAPE.num_pages
            group = bench.views.group_of_layer[0]
            live = bench.views.recurrent[0][source.pages[group]]
            assert torch.equal(bench.views.recurrent[0][pages[group]], live)
            continue
        branch = Sequence(ids, source.units, pages, num_done=position)
        bench.step([(branch, len(ids) - position)])
        assert (branch.logits[0] - wanted[position:]).abs().max() <= TOLERANCE


def test_exports_change_no_logits() -> None:
    ids = tokens(30, 24)
    bench = Bench("auto", seed=4)
    sequence = bench.new(ids)
    export = StateExport(row=0, offset=16, pages=tuple(bench.new_state()))
    bench.step([(sequence, 24)], (export,))
    assert torch.allclose(sequence.logits[0], alone("auto", ids), atol=1e-6)


def test_a_new_sequence_on_used_pages_starts_from_nothing() -> None:
    bench = Bench("auto", seed=5)
    first = bench.new(tokens(40, 16))
    bench.step([(first, 16)])
    ids = tokens(41, 16)
    second = Sequence(ids, first.units, first.pages)
    bench.step([(second, 1)])
    bench.step([(second, 15)])
    assert (torch.cat(second.logits) - alone("auto", ids)).abs().max() <= TOLERANCE


def test_a_chunk_that_wants_no_logits_still_advances_its_sequence() -> None:
    ids = tokens(50, 20)
    bench = Bench("auto", seed=6)
    sequence = bench.new(ids)
    batch = ForwardBatch(
        token_ids=ids[:12],
        query_starts=(0, 12),
        context_lengths=(0,),
        unit_tables=torch.tensor([sequence.units], dtype=torch.int32),
        state_pages=torch.tensor([sequence.pages], dtype=torch.int32),
        logits_rows=(),
    )
    output = bench.model(batch, bench.views)
    assert output.logits.shape == (0, golden().config.text.vocab_size)
    sequence.num_done = 12
    bench.step([(sequence, 8)])
    assert (sequence.logits[0] - alone("auto", ids)[12:]).abs().max() <= TOLERANCE
