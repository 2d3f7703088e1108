"""A lookup looks where states are, and finds what looking everywhere would find."""

import random
from array import array

from k3core.cache.coordinator import PrefixCache
from k3core.cache.paged_manager import STRETCH_UNITS
from k3core.cache.sequence import Sequence
from k3core.cache.spec import CacheConfig, Retention
from k3core.scheduler.plan import RowResult
from k3core.scheduler.request import Request
from k3core.scheduler.scheduler import Scheduler, SchedulerConfig

_UNIT = 4


def _run(scheduler: Scheduler, name: str, prompt: "array[int]") -> None:
    scheduler.add(Request(name, prompt, 0))
    while scheduler.has_work():
        plan = scheduler.schedule()
        results = [
            RowResult(row.request_id, (), tuple(export.position for export in row.exports))
            for row in plan.rows
        ]
        scheduler.commit(plan, results)


def _expect_what_a_whole_walk_finds(cache: PrefixCache, sequence: Sequence) -> str:
    match, sealed = cache.lookup(sequence), cache.states.sealed
    restorable = sequence.digests[: min(match.matched, match.num_tokens - 1) // _UNIT]
    places = [place for place, digest in enumerate(restorable, 1) if digest in sealed]
    assert match.hit == (places[-1] * _UNIT if places else 0)
    lost = cache.paged.lost_state.intersection(restorable[match.hit // _UNIT :])
    if match.gap:
        assert match.reason == ("evicted" if lost else "no_checkpoint")
    return match.reason or "hit"


def test_the_deepest_state_is_found_on_paths_of_many_stretches_that_fork_and_lose_states() -> None:
    chooser = random.Random(5)
    retention = Retention(intervals=(40 * _UNIT,))
    config = CacheConfig(
        unit_tokens=_UNIT, page_units=4, num_pages=230, export_alignment=1, retention=retention
    )
    scheduler = Scheduler(SchedulerConfig(chunk_tokens=(4_096,)), PrefixCache(config))
    prompts = [array("i", [0])]
    seen: dict[str, int] = {}
    for number in range(60):
        shared = chooser.choice(prompts)
        kept = chooser.randrange(len(shared) + 1)
        length = chooser.randrange(1, 4 * STRETCH_UNITS * _UNIT - kept % 100)
        prompt = shared[:kept] + array("i", [number + 1] * max(1, length - kept))
        prompts.append(prompt)
        _run(scheduler, str(number), prompt)
        for other in prompts[-12:]:
            sequence = scheduler.cache.new_sequence("x", other + array("i", [-1] * 9))
            found = _expect_what_a_whole_walk_finds(scheduler.cache, sequence)
            seen[found] = seen.get(found, 0) + 1
    assert min(seen.get(kind, 0) for kind in ("hit", "evicted", "no_checkpoint")) > 5, seen
    assert scheduler.cache.reset()
    assert not any(scheduler.cache.paged._num_with_state), "what left the index left no note"
