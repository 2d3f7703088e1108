"""The real model over the real cache: what is restored goes on as if it had never been left.

Held for the small golden checkpoint and for the one that is shipped.
"""

import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from support.golden_model import micro_model
from support.shipped_model import nano_model

from k3core.batch import ForwardBatch, StateExport
from k3core.cache.audit import audit
from k3core.cache.coordinator import PrefixCache
from k3core.cache.layout import model_sizes, plan_layout
from k3core.cache.pools import PageArena
from k3core.cache.spec import CacheConfig, Codec, ExportMode, Retention
from k3core.model.text import TextModel
from k3core.scheduler.plan import PageCopy, RowResult, StepPlan
from k3core.scheduler.request import Request
from k3core.scheduler.scheduler import Scheduler, SchedulerConfig

UNIT = 4
TOLERANCE = 2e-5
"""Of two runs of one prompt, by what `k3core.model.text` promises, a unit of logits."""


@dataclass(frozen=True)
class Served:
    """A model that is served, and the scale of its logits."""

    model: Callable[[], TextModel]
    scale: float


_ACTIONS = ("preempt", "abort", "evict a state", "evict a leaf")
MICRO = Served(micro_model, 4.8)
NANO = Served(nano_model, 15.0)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


class Worker:
    """A scheduler, an arena full of rubbish and the small model; greedy."""

    def __init__(
        self,
        pages: int = 64,
        chunks: tuple[int, ...] = (512,),
        export_mode: ExportMode = "in_pass",
        codec: Codec = "raw",
        retention: Retention | None = None,
        served: Served = MICRO,
    ) -> None:
        self.model = served.model()
        sizes = model_sizes(self.model.config, row_itemsize=4, conv_itemsize=4)
        layout = plan_layout(sizes, UNIT)
        self.arena = PageArena(layout, pages, torch.float32, torch.float32)
        self.arena.bytes.view(torch.float32).fill_(7.0)
        config = CacheConfig(
            unit_tokens=UNIT,
            page_units=layout.page_units,
            num_pages=pages,
            state_groups=layout.num_groups,
            int8_groups=layout.int8_groups,
            checkpoint_grid=UNIT,
            export_alignment=1,
            export_mode=export_mode,
            codec=codec,
            retention=retention or Retention(dense=True, decode_grid=UNIT),
        )
        self.scheduler = Scheduler(SchedulerConfig(chunk_tokens=chunks), PrefixCache(config))
        self.logits: dict[str, list[torch.Tensor]] = {}

    def add(self, name: str, tokens: list[int], new: int) -> None:
        self.logits[name] = []
        assert self.scheduler.add(Request(name, array("i", tokens), new)) is None

    def run(self) -> None:
        while self.step():
            pass

    def step(self) -> bool:
        plan = self.scheduler.schedule()
        if not plan.rows:
            return False
        for copy in plan.moves:
            self.arena.copy_pages(copy.src, copy.dst)
        for copy in plan.restores:
            self._restore(copy)
        output = self.model(_batch(plan), self.arena.views)
        for copy in plan.encodes:
            self.arena.encode_state(copy.src, copy.dst)
        wanting = [row.request_id for row in plan.rows if row.wants_logits]
        sampled: dict[str, int] = {}
        for name, row in zip(wanting, output.logits, strict=True):
            self.logits[name].append(row.clone())
            sampled[name] = int(row.argmax())
        self.scheduler.commit(plan, [_result(row, sampled) for row in plan.rows])
        return True

    def _restore(self, copy: PageCopy) -> None:
        if copy.codec == "int8":
            self.arena.decode_state(copy.src, copy.dst)
        else:
            self.arena.copy_pages(copy.src, copy.dst)


def _result(row: object, sampled: dict[str, int]) -> RowResult:
    name = row.request_id  # pyright: ignore[reportAttributeAccessIssue]
    exports = row.exports  # pyright: ignore[reportAttributeAccessIssue]
    tokens = (sampled[name],) if name in sampled else ()
    return RowResult(name, tokens, tuple(export.position for export in exports))


def _batch(plan: StepPlan) -> ForwardBatch:
    rows, starts = plan.rows, [0]
    for row in rows:
        starts.append(starts[-1] + row.length)
    tables = torch.zeros(len(rows), max(len(row.units) for row in rows), dtype=torch.int32)
    for index, row in enumerate(rows):
        tables[index, : len(row.units)] = torch.tensor(row.units, dtype=torch.int32)
    return ForwardBatch(
        token_ids=torch.tensor([token for row in rows for token in row.token_ids]),
        query_starts=tuple(starts),
        context_lengths=tuple(row.start for row in rows),
        unit_tables=tables,
        state_pages=torch.tensor([row.state_pages for row in rows], dtype=torch.int32),
        logits_rows=tuple(starts[i + 1] - 1 for i, row in enumerate(rows) if row.wants_logits),
        exports=tuple(
            StateExport(i, export.offset, export.pages)
            for i, row in enumerate(rows)
            for export in row.exports
        ),
    )


def _tokens(seed: int, count: int, served: Served = MICRO) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(served.model().config.vocab_size) for _ in range(count)]


def _cold(tokens: list[int], new: int, served: Served = MICRO) -> list[torch.Tensor]:
    worker = Worker(retention=Retention(prompt_end=False), served=served)
    worker.add("cold", tokens, new)
    worker.run()
    return worker.logits["cold"]


def _assert_alike(
    found: list[torch.Tensor], wanted: list[torch.Tensor], served: Served = MICRO
) -> None:
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE * served.scale)


@pytest.mark.parametrize(
    ("served", "mode", "chunks"),
    [
        (MICRO, "in_pass", (512,)),
        (MICRO, "align", (512,)),
        (MICRO, "partial", (512,)),
        (NANO, "in_pass", (14, 9)),
    ],
)
def test_from_every_position_the_run_goes_on_as_the_uninterrupted_one(
    served: Served, mode: ExportMode, chunks: tuple[int, ...]
) -> None:
    worker = Worker(export_mode=mode, chunks=chunks, served=served)
    stem = _tokens(1, 41, served)
    worker.add("owner", stem, 1)
    worker.run()
    positions = {c.position for c in worker.scheduler.cache.states.sealed.values()}
    # Where states appear at chunk ends only, one chunk leaves the last ones only.
    assert positions == (set(range(4, 41, 4)) if mode == "in_pass" else {40})
    for position in sorted(positions):
        prompt = stem[:position] + _tokens(position, 3, served)
        worker.add(f"from {position}", prompt, 3)
        worker.run()
        usage = worker.scheduler.usage(f"from {position}")
        assert usage is not None
        assert usage.cached_local == position
        _assert_alike(worker.logits[f"from {position}"], _cold(prompt, 3, served), served)


@pytest.mark.parametrize(
    ("served", "seed"), [(MICRO, 0), (MICRO, 2), (MICRO, 3), (NANO, 4), (NANO, 5)]
)
def test_random_interleavings_give_the_outputs_of_runs_without_a_cache(
    served: Served, seed: int
) -> None:
    rng = random.Random(seed)
    worker = Worker(pages=40, chunks=(9, 30, 5), served=served)
    prompts: dict[str, list[int]] = {}
    done: dict[str, int] = {}
    stems = [_tokens(100 + i, 30, served) for i in range(2)]
    for number in range(14):
        name = f"r{number}"
        prompts[name] = rng.choice(stems)[: rng.randrange(5, 30)] + _tokens(
            number, rng.randrange(9), served
        )
        worker.add(name, prompts[name], rng.randrange(1, 6))
        for _ in range(rng.randrange(4)):
            worker.step()
        other = rng.choice(list(prompts)[-3:])
        action = _ACTIONS[number % 4]
        if action == "preempt":
            is_done = worker.scheduler.preempt(other)
        elif action == "abort":
            is_done = worker.scheduler.abort(other)
            if is_done:
                del prompts[other]
        elif action == "evict a state":
            is_done = worker.scheduler.cache.evictor.evict_oldest_state()
        else:
            is_done = worker.scheduler.cache.evictor.evict_oldest_leaf()
        done[action] = done.get(action, 0) + is_done
        assert audit(worker.scheduler.cache) == []
    worker.run()
    assert worker.scheduler.cache.stats.hit_tokens > 0
    assert all(done.values())
    for name, prompt in prompts.items():
        cold = _cold(prompt, len(worker.logits[name]), served)
        _assert_alike(worker.logits[name], cold, served)


def test_compressed_checkpoints_keep_the_answer_close_after_ten_generations_too() -> None:
    worker, stem = Worker(codec="int8"), _tokens(5, 41)
    for number in range(10):
        worker.add(f"generation {number}", stem[: (number + 1) * UNIT], 1)
        worker.run()
        usage = worker.scheduler.usage(f"generation {number}")
        assert usage is not None
        assert usage.cached_local == number * UNIT
    worker.add("last", stem, 1)
    worker.run()
    # Half a step of 1/127 in every element of every state: small beside logits of 4.8.
    torch.testing.assert_close(worker.logits["last"][0], _cold(stem, 1)[0], rtol=0, atol=0.06)
