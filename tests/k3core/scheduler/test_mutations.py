"""The random lives find each of the known kinds of fault when it is put back.

A guard that cannot fail guards nothing: every mutation is a fault that some published engine
had, re-introduced from outside, and must be found within 2,000 lives.
"""

from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from support.cache_machine import CacheMachine

from k3core.cache import coordinator, match
from k3core.cache.admission import Admission
from k3core.cache.coordinator import PrefixCache
from k3core.cache.fence import StepFence
from k3core.cache.hashing import ImageMark
from k3core.cache.positions import StateClass
from k3core.cache.promises import Promises
from k3core.cache.sequence import Sequence
from k3core.cache.spec import CacheError, Retention
from k3core.cache.state_manager import Checkpoint
from k3core.scheduler.entry import Entry
from k3core.scheduler.plan import RowPlan
from k3core.scheduler.planner import DraftStep, StepPlanner
from k3core.simulate.toy_device import ToyDevice

# Frames of the mutated methods; their arguments are passed on untouched.
Patch = pytest.MonkeyPatch
_ROOMY = {
    "num_pages": 30,
    "num_slots": 12,
    "memory": "two_pools",
    "checkpoint_grid": 4,
    "partial_hits": True,
    "export_mode": "in_pass",
}


def _publish_at_chunk_end(patch: Patch) -> dict[str, object]:
    sound = ToyDevice._fold_chunk

    def mutant(
        self: ToyDevice, row: RowPlan, fold: Any, chunk: "array[int]", committed: int
    ) -> tuple[int, ...]:
        exported = sound(self, row, fold, chunk, committed)
        for export in row.exports:
            for page in export.pages:
                self._states[page] = fold.copy()
        return exported

    patch.setattr(ToyDevice, "_fold_chunk", mutant)
    return {}


def _drop_twice(patch: Patch) -> dict[str, object]:
    sound = match.drop_tokens
    patch.setattr(match, "drop_tokens", lambda config: 2 * sound(config))
    return {"draft": "drop", "retention": Retention(dense=True), **_ROOMY}


def _free_before_the_step_is_back(patch: Patch) -> dict[str, object]:
    patch.setattr(StepFence, "after", lambda self, effect: effect())
    return {}


def _visible_in_the_same_step(patch: Patch) -> dict[str, object]:
    sound_add, sound_seal = StepPlanner.add_chunk, PrefixCache.seal

    def add_chunk(self: StepPlanner, step: DraftStep, entry: Entry, budget: int) -> int:
        taken = sound_add(self, step, entry, budget)
        cache, sequence = self._cache, entry.sequence
        unit = cache.config.unit_tokens
        full = (sequence.num_computed + taken) // unit
        if full > sequence.num_published:
            cache.paged.publish(
                sequence.units, sequence.digests, sequence.num_published, full, cache.epoch
            )
        for export, _ in entry.exports:
            place = export.position // unit
            cache.paged.note_state(sequence.units[place - 1])
            cache.states.seal(
                Checkpoint(
                    sequence.digests[place - 1],
                    export.position,
                    export.pages,
                    "raw",
                    StateClass.ENDPOINT,
                    sequence.units[place - 1],
                    cache.epoch,
                    0,
                    0,
                )
            )
        cache.promises.pending.clear()
        return taken

    def seal(
        self: PrefixCache,
        sequence: Sequence,
        position: int,
        pages: tuple[int, ...],
        reason: StateClass,
    ) -> bool:
        digest = sequence.digests[position // self.config.unit_tokens - 1]
        known = self.states.sealed.get(digest)
        if known is not None and known.pages == pages:
            return True
        return sound_seal(self, sequence, position, pages, reason)

    patch.setattr(StepPlanner, "add_chunk", add_chunk)
    patch.setattr(PrefixCache, "seal", seal)
    patch.setattr(Promises, "_withdraw", lambda self, digest: None)
    return {"codec": "raw", "export_mode": "in_pass", "path_cap": -1}


def _state_of_the_first_column(patch: Patch) -> dict[str, object]:
    sound = ToyDevice._fold_chunk

    def mutant(
        self: ToyDevice, row: RowPlan, fold: Any, chunk: "array[int]", committed: int
    ) -> tuple[int, ...]:
        return sound(self, row, fold, chunk, 1 if row.is_decode else committed)

    patch.setattr(ToyDevice, "_fold_chunk", mutant)
    return {"draft": "no_drop"}


def _picture_folded_to_16_bits(patch: Patch) -> dict[str, object]:
    def fold(offset: int, count: int, key: bytes) -> ImageMark:
        return ImageMark(offset, count, key[:2] + bytes(30))

    patch.setattr(coordinator, "ImageMark", fold)
    return {}


def _counted_again_on_retry(patch: Patch) -> dict[str, object]:
    sound = PrefixCache.commit

    def commit(self: PrefixCache, admission: Admission) -> None:
        admission.is_resumed = False
        sound(self, admission)

    patch.setattr(PrefixCache, "commit", commit)
    return {}


def _moved_during_a_transfer(patch: Patch) -> dict[str, object]:
    patch.setattr(PrefixCache, "_is_movable", lambda self, page: self.fence.is_idle)
    return {"memory": "two_ended_eager", "host_bytes": 0, "num_pages": 14, "page_units": 1}


def _sealed_though_not_written(patch: Patch) -> dict[str, object]:
    sound = ToyDevice._fold_chunk

    def mutant(
        self: ToyDevice, row: RowPlan, fold: Any, chunk: "array[int]", committed: int
    ) -> tuple[int, ...]:
        exports = row.exports
        exported = sound(self, row, fold, chunk, committed)
        for export in exports[:1]:
            for page in export.pages:
                self._states.pop(page, None)
        return exported

    patch.setattr(ToyDevice, "_fold_chunk", mutant)
    return {}


_MUTATIONS: list[Callable[[Patch], dict[str, object]]] = [
    _publish_at_chunk_end,
    _drop_twice,
    _free_before_the_step_is_back,
    _visible_in_the_same_step,
    _state_of_the_first_column,
    _picture_folded_to_16_bits,
    _counted_again_on_retry,
    _moved_during_a_transfer,
    _sealed_though_not_written,
]


@pytest.mark.parametrize("mutate", _MUTATIONS, ids=lambda each: each.__name__.strip("_"))
def test_the_fault_is_found(
    mutate: Callable[[Patch], dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    forced = mutate(monkeypatch)
    machine = type("Mutant", (CacheMachine,), {"forced": forced})
    # The checks of the machine, or the cache's own: never a fault of the mutation itself.
    with pytest.raises((AssertionError, CacheError)):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=2_000,
                stateful_step_count=30,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
