"""Where checkpoints are taken: the one place that computes positions.

Planner, allocator and kernel launcher ask here and nowhere else; a seal compares what was
written with what this said. Everything is a pure function of its arguments.

Letters: U unit, B grid, A alignment, n prompt tokens.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from k3core.cache.spec import CacheConfig


class StateClass(IntEnum):
    """Why a checkpoint is kept; a lower class is evicted before a higher one of equal age."""

    OPPORTUNISTIC = 0
    GRID = 1
    ENDPOINT = 2
    JUNCTION = 3


# Endpoints and promoted states are of one rank when something has to go.
EVICTION_RANK = {
    StateClass.OPPORTUNISTIC: 0,
    StateClass.GRID: 1,
    StateClass.ENDPOINT: 2,
    StateClass.JUNCTION: 2,
}


@dataclass(frozen=True, slots=True)
class Chunk:
    """One forward's share of a prompt.

    Attributes:
        end: tokens computed after it.
        exports: positions to write inside it, ascending, start < p <= end.
    """

    end: int
    exports: tuple[int, ...]


def granularity(config: CacheConfig) -> int:
    """Tokens of which every stored position is a multiple."""
    if config.partial_hits and config.export_mode != "align":
        return config.unit_tokens
    return config.grid


def drop_tokens(config: CacheConfig) -> int:
    """Tokens by which a drafter shortens every match; all consumers ask here."""
    return config.unit_tokens if config.draft == "drop" else 0


def recomputed_tokens(config: CacheConfig) -> int:
    """Last tokens of every prompt that are never restored; all consumers ask here."""
    return config.replay_tokens if config.draft == "replay" else 1


def prompt_targets(
    config: CacheConfig,
    n: int,
    hit: int,
    junction: int = 0,
    markers: Iterable[int] = (),
    spare_states: int = 0,
) -> dict[int, StateClass]:
    """Positions of a prompt to keep, hit < p <= n, each with the strongest reason for it.

    Args:
        config: policies and sizes.
        n: prompt tokens.
        hit: tokens restored; nothing at or before it is written again.
        junction: promotion boundary, 0 for none; floored to what can be stored and reached.
        markers: message boundaries, floored likewise; read under `markers` promotion only.
        spare_states: free states that an opportunistic export may take.
    """
    unit, grid, keep = config.unit_tokens, config.grid, config.retention
    fine = granularity(config)
    chosen: dict[int, StateClass] = {}

    def want(position: int, reason: StateClass) -> None:
        if hit < position <= n and chosen.get(position, -1) < reason:
            chosen[position] = reason

    # The deepest position that a repetition of this very prompt can restore.
    last = _floor(n - 1, unit)
    drop = drop_tokens(config)
    if drop:
        last = max(0, _floor(n, unit) - drop)
    if keep.dense:
        for position in range(_floor(hit, grid) + grid, n + 1, grid):
            want(position, StateClass.GRID)
    for interval in keep.intervals:
        for position in range(_floor(hit, interval) + interval, n + 1, interval):
            want(position, StateClass.GRID)
    # Under replay a repetition restores less than a prompt that continues this one.
    for end in (last, min(last, max(0, n - recomputed_tokens(config)))):
        if keep.prompt_end:
            want(_floor(end, grid), StateClass.ENDPOINT)
        if keep.prompt_end or keep.unit_end:
            want(_floor(end, fine), StateClass.ENDPOINT)
    # A prompt that ends on a unit leaves its exact end too, for prompts that continue it.
    # On a coarse grid that end is a grid position, which is `dense`'s to keep.
    is_end_kept = (keep.prompt_end or keep.unit_end) and fine < grid and not drop
    if is_end_kept and n % fine == 0:
        want(n, StateClass.ENDPOINT)
    want(_floor(min(junction, n - 1), fine), StateClass.JUNCTION)
    if config.promotion == "markers":
        for marker in markers:
            want(max(0, _floor(min(marker, n), fine) - drop), StateClass.JUNCTION)
    if keep.opportunistic and spare_states > 0 and fine == unit:
        count = (_floor(n, unit) - _floor(hit, unit)) // unit
        stride = max(1, -(-count // spare_states)) * unit
        for position in range(_floor(n, unit), hit, -stride):
            want(position, StateClass.OPPORTUNISTIC)
    return chosen


def next_chunk(
    config: CacheConfig, start: int, budget: int, n: int, targets: dict[int, StateClass]
) -> Chunk:
    """The next forward of a prompt: where it ends and what it exports.

    A chunk that does not finish the prompt ends on a multiple of the unit (and of A where the
    budget allows), so that positions never depend on how full a step was.

    Args:
        config: policies and sizes.
        start: tokens computed already, < n.
        budget: most tokens this chunk may take, >= 1.
        n: tokens to compute in all.
        targets: positions wanted, as `prompt_targets` gave them.
    """
    end = min(start + budget, n)
    if config.export_mode == "in_pass":
        end = _aligned_end(config, start, end, n)
        return Chunk(end, _in_pass_exports(config, start, end, targets))
    end = _cut_end(config, start, end, n, targets)
    return Chunk(end, (end,) if end in targets else ())


def decode_targets(config: CacheConfig, start: int, end: int) -> tuple[int, ...]:
    """Positions start < p <= end of generated tokens that are kept while decoding."""
    keep = config.retention
    steps = [step for step in (*keep.intervals, keep.decode_grid) if step]
    if keep.dense:
        steps.append(config.grid)
    if keep.unit_end and config.partial_hits:
        steps.append(config.unit_tokens)
    found = {
        position for step in steps for position in range(_floor(start, step) + step, end + 1, step)
    }
    return tuple(sorted(found))


def is_rolling(config: CacheConfig, position: int) -> bool:
    """Whether a decode checkpoint is only the newest end of a growing sequence.

    Such a one is replaced by the next; those on a grid stay.
    """
    keep = config.retention
    steps = [step for step in (*keep.intervals, keep.decode_grid) if step]
    if keep.dense:
        steps.append(config.grid)
    return all(position % step for step in steps)


def _aligned_end(config: CacheConfig, start: int, end: int, n: int) -> int:
    unit = config.unit_tokens
    if start % unit:
        return min(end, _floor(start, unit) + unit)
    if end == n:
        return end
    for step in (math.lcm(unit, config.export_alignment), unit):
        if _floor(end, step) > start:
            return _floor(end, step)
    return end


def _in_pass_exports(
    config: CacheConfig, start: int, end: int, targets: dict[int, StateClass]
) -> tuple[int, ...]:
    """Targets that the kernel can reach from this start; one it cannot moves back to one it can.

    The chunk's own end is always there: it is the state that the pass leaves.
    """
    step = config.export_alignment
    exports: set[int] = set()
    for position in targets:
        if not start < position <= end:
            continue
        if (position - start) % step == 0 or position == end:
            exports.add(position)
        elif targets[position] > StateClass.OPPORTUNISTIC:
            behind = _reachable_before(config, start, position)
            if behind > start:
                exports.add(behind)
    return tuple(sorted(exports))


def _reachable_before(config: CacheConfig, start: int, position: int) -> int:
    fine, step = granularity(config), config.export_alignment
    behind = _floor(position, fine)
    # Positions repeat their distance to the alignment after `step` multiples at most.
    for _ in range(step):
        if behind <= start or (behind - start) % step == 0:
            return behind
        behind -= fine
    return start


def _cut_end(
    config: CacheConfig, start: int, end: int, n: int, targets: dict[int, StateClass]
) -> int:
    """End of a chunk where states appear at chunk ends only."""
    grid = config.grid
    last = _floor(n, grid)
    if start % grid:
        end = min(end, _floor(start, grid) + grid)
    elif start < last:
        if end >= last:
            end = last
        elif end - start >= grid:
            end = _floor(end, grid)
    cuts = [
        position
        for position, reason in targets.items()
        if start < position < end
        and (
            reason > StateClass.GRID
            or any(position % interval == 0 for interval in config.retention.intervals)
        )
    ]
    if config.export_mode == "partial":
        tail = _floor(n - 1, config.unit_tokens) - drop_tokens(config)
        if start < tail < end:
            cuts.append(tail)
    return min(cuts, default=end)


def _floor(value: int, step: int) -> int:
    return value // step * step
