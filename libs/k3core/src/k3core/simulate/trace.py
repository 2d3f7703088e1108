"""Replays a trace through the scheduler and the cache, one request after the other.

Nothing is computed: a step is reported as done as soon as it is planned. What comes out is
what the policies would have reused, written and evicted.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean
from time import perf_counter_ns

from k3core.cache.coordinator import PrefixCache
from k3core.cache.spec import CacheConfig
from k3core.scheduler.plan import RowResult, Usage
from k3core.scheduler.request import Request
from k3core.scheduler.scheduler import Scheduler, SchedulerConfig
from k3core.simulate.trace_formats import TraceRequest


@dataclass(frozen=True, slots=True)
class TraceReport:
    """What a replay found. Rates are of input tokens; `bytes` need the sizes to be given.

    Attributes:
        mla_match_rate: share of input whose rows were here, whether or not a state let them be
            used; the ceiling of `hit_rate`.
        recomputed_per_request: p50, p95 and mean of tokens computed.
        states_written: checkpoints sealed; a position that was there already is not one.
        states_asked: positions that the rules name beyond what was restored, each rule by
            itself and the prompt's end always, whether or not the state was there already.
        states_resident_max: most checkpoints at once.
        evictions: of checkpoints by class, and of units.
        reuse_gap_tokens: matched and not used, by reason.
        refused: requests that can never fit.
        moved_pages: moved by compactions.
        tokens_per_second: input tokens over the replay's own wall time.
    """

    requests: int
    input_tokens: int
    hit_tokens: int
    hit_rate: float
    mla_match_rate: float
    recomputed_per_request: dict[str, float]
    states_written: int
    states_asked: int
    states_by_class: dict[str, int]
    states_resident_max: int
    evictions: dict[str, int]
    reuse_gap_tokens: dict[str, int]
    refused: int
    moved_pages: int
    bytes: dict[str, int]
    wall_s: float
    tokens_per_second: float


def unlimited(config: CacheConfig, requests: list[TraceRequest]) -> CacheConfig:
    """The same policies with room for everything that a trace will ever write."""
    distinct = len({digest for request in requests for digest in request.digests})
    longest = max((request.num_tokens for request in requests), default=1)
    units = distinct + 2 * (longest // config.unit_tokens + 2)
    # Every request may leave its last page partly filled.
    pages = -(-units // config.page_units) + (len(requests) if config.page_units > 1 else 0) + 1
    slots = distinct + 2
    return replace(config, memory="two_pools", num_pages=pages, num_slots=slots)


def replay(
    config: CacheConfig,
    requests: Iterable[TraceRequest],
    chunk_tokens: int = 1 << 30,
    states_per_session: int = 0,
    state_bytes: int = 0,
    row_bytes: int = 0,
) -> TraceReport:
    """Run every request to its first token, in order.

    Args:
        config: sizes and policies.
        requests: of one trace, at the config's unit.
        chunk_tokens: budget of a step.
        states_per_session: newest checkpoints kept of one session, whatever their path; 0 for
            no bound.
        state_bytes: of one checkpoint, for the byte totals.
        row_bytes: of one token's rows in all layers.

    Raises:
        CacheError: if the configuration contradicts itself.
    """
    cache = PrefixCache(config, b"trace")
    scheduler = Scheduler(SchedulerConfig(chunk_tokens=(chunk_tokens,)), cache)
    sessions = _SessionBudget(cache, states_per_session)
    computed: list[int] = []
    blank = array("i")
    refused = units_max = asked = 0
    total_ns = 0
    for number, item in enumerate(requests):
        if len(blank) < item.num_tokens:
            blank = array("i", bytes(8 * item.num_tokens))
        name = str(number)
        request = Request(name, blank[: item.num_tokens], 0, unit_digests=item.digests)
        started = perf_counter_ns()
        if scheduler.add(request) is not None:
            refused += 1
            continue
        written = _run(scheduler)
        sessions.add(item, written)
        usage = scheduler.usage(name)
        scheduler.forget_usage(name)
        total_ns += perf_counter_ns() - started
        assert usage is not None
        computed.append(usage.computed)
        asked += _asked(config, usage)
        units_max = max(units_max, len(cache.paged.index))
    wall_s = total_ns / 1e9
    report = _report(cache, computed, refused, units_max, wall_s, state_bytes, row_bytes)
    return replace(report, states_asked=asked)


class _SessionBudget:
    """Keeps the newest checkpoints of each session and drops the others."""

    def __init__(self, cache: PrefixCache, limit: int) -> None:
        self._cache = cache
        self._limit = limit
        self._kept: dict[str, OrderedDict[bytes, None]] = {}

    def add(self, item: TraceRequest, positions: list[int]) -> None:
        """A request was run and wrote these positions, new or again."""
        if not self._limit:
            return
        kept = self._kept.setdefault(item.session, OrderedDict())
        unit = self._cache.config.unit_tokens
        for position in positions:
            digest = item.digests[position // unit - 1]
            kept[digest] = None
            kept.move_to_end(digest)
        while len(kept) > self._limit:
            checkpoint = self._cache.states.sealed.get(kept.popitem(last=False)[0])
            if checkpoint is not None:
                self._cache.evictor.evict_state(checkpoint)


def _asked(config: CacheConfig, usage: Usage) -> int:
    keep, n, hit = config.retention, usage.prompt_tokens, usage.cached_local
    steps = list(keep.intervals) + ([config.grid] if keep.dense else [])
    count = sum(n // step - hit // step for step in steps)
    count += keep.prompt_end or keep.unit_end
    return count + (usage.reuse_gap > 0 and config.promotion != "never")


def _run(scheduler: Scheduler) -> list[int]:
    """Run what is queued to its end; the positions that were written."""
    written: list[int] = []
    while scheduler.has_work():
        plan = scheduler.schedule()
        assert plan.rows, "a request that fits an idle cache is always planned"
        results: list[RowResult] = []
        for row in plan.rows:
            positions = tuple([export.position for export in row.exports])
            written += positions
            results.append(RowResult(row.request_id, (), positions))
        scheduler.commit(plan, results)
    return written


def _report(
    cache: PrefixCache,
    computed: list[int],
    refused: int,
    units_max: int,
    wall_s: float,
    state_bytes: int,
    row_bytes: int,
) -> TraceReport:
    stats = cache.stats
    total = max(1, stats.prompt_tokens)
    ordered = sorted(computed) or [0]
    resident = cache.states.max_sealed
    return TraceReport(
        requests=stats.queries,
        input_tokens=stats.prompt_tokens,
        hit_tokens=stats.hit_tokens,
        hit_rate=stats.hit_tokens / total,
        mla_match_rate=stats.matched_tokens / total,
        recomputed_per_request={
            "p50": ordered[len(ordered) // 2],
            "p95": ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)],
            "mean": fmean(ordered),
        },
        states_written=sum(stats.exports.values()),
        states_asked=0,
        states_by_class=dict(sorted(stats.exports.items())),
        states_resident_max=resident,
        evictions={**dict(sorted(stats.evicted_states.items())), "units": stats.evicted_units},
        reuse_gap_tokens=dict(sorted(stats.gap_tokens.items())),
        refused=refused,
        moved_pages=cache.pool.num_moves(),
        bytes={
            "states_written": sum(stats.exports.values()) * state_bytes,
            "states_resident_max": resident * state_bytes,
            "rows_resident_max": units_max * cache.config.unit_tokens * row_bytes,
        },
        wall_s=wall_s,
        tokens_per_second=total / wall_s if wall_s else 0.0,
    )
