"""Host memory that cannot be read, at random: nothing wrong is said, counted or left behind."""

import random

import pytest

from k3core.cache.spec import CacheConfig, Codec, Retention
from k3core.simulate.scenario import ScenarioRunner
from k3core.simulate.scenario_file import Case


def _life(seed: int, codec: Codec) -> tuple[ScenarioRunner, set[int]]:
    """Requests over few stems and a small arena; now and then something that was kept is bad."""
    draw = random.Random(seed)
    config = CacheConfig(
        unit_tokens=4,
        page_units=draw.choice([1, 2]),
        num_pages=14,
        export_alignment=1,
        retention=Retention(dense=True),
        codec=codec,
        page_bytes=32,
        host_bytes=2000,
    )
    runner = ScenarioRunner(Case("life", config, (draw.choice([9, 64]),), 0, 4, ()))
    tier, spoiled = runner.cache.tier, set[int]()
    assert tier is not None
    for number in range(80):
        stem, end = [draw.choice("ab"), 0, draw.randrange(8, 28)], ["end", 0, draw.randrange(5)]
        action = draw.choice(["submit", "submit", "step", "step", "step", "step", "spoil", "leave"])
        known = list(runner.tracks)[-2:]
        kept = [*tier.units.values(), *tier.states.values()]
        if action == "submit":
            output = [["o", 0, draw.randrange(4)]]
            runner.submit(f"r{number}", {"prompt": [stem, end], "output": output})
        elif action == "step":
            runner.step()
        elif action == "leave" and known:
            (runner.abort if draw.random() < 0.5 else runner.preempt)(draw.choice(known))
        elif kept:
            spoiled.add(draw.choice(kept).host)
            runner.unreadable |= spoiled
    runner.run(list(runner.tracks))
    return runner, spoiled


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_lives_over_memory_that_goes_bad_end_well_and_are_counted_once(codec: Codec) -> None:
    num_restores = num_computed_again = 0
    for seed in range(8):
        runner, spoiled = _life(seed, codec)
        assert runner.failures == []
        assert {track.status for track in runner.tracks.values()} <= {"finished", "aborted"}
        for track in runner.tracks.values():
            assert track.status == "aborted" or track.output == track.output_wanted.tolist()
        usages = [runner.scheduler.usage(name) for name in runner.tracks]
        stats = runner.cache.stats
        assert sum(usage.prompt_tokens for usage in usages if usage) == stats.prompt_tokens
        assert sum(usage.checkpoint for usage in usages if usage) == stats.hit_tokens
        num_restores += stats.host_restores
        tier = runner.cache.tier
        assert tier is not None
        left = {entry.host for entry in (*tier.units.values(), *tier.states.values())}
        num_computed_again += len(spoiled - left)
    assert num_restores > 20
    assert num_computed_again > 5
