"""What the prefix cache costs on the host: run it to print a table against its targets.

    python benchmarks/prefix_cache.py [--trace mooncake_conversation.jsonl.gz]

Every figure is processor time, the best of several runs of pure bookkeeping; nothing is computed
or copied.
"""

import argparse
from array import array
from collections.abc import Callable
from pathlib import Path
from time import process_time_ns

from k3core.cache.coordinator import PrefixCache
from k3core.cache.hashing import extend_digests, root_digest
from k3core.cache.sequence import Sequence
from k3core.cache.spec import CacheConfig, Retention
from k3core.scheduler.plan import RowResult
from k3core.scheduler.request import Request
from k3core.scheduler.scheduler import Scheduler, SchedulerConfig
from k3core.simulate.trace import replay, unlimited
from k3core.simulate.trace_formats import read_trace

UNIT = 128


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trace", type=Path, help="a Mooncake trace for the simulator's speed")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    rows = [
        hashing(args.repeat),
        lookup(args.repeat, has_states=True),
        lookup(args.repeat, has_states=False),
        lookup(args.repeat, has_states=False, num_others=20),
        *scaling(args.repeat),
        million(args.repeat),
    ]
    if args.trace:
        rows.append(simulator(args.trace, min(args.repeat, 3)))
    for name, value, unit, target in rows:
        is_rate = unit.endswith("/s")
        mark = "ok" if (value >= target if is_rate else value <= target) else "MISSED"
        print(f"{name:52s} {value:10.2f} {unit:9s} target {target:8.2f}  {mark}")


Row = tuple[str, float, str, float]


def hashing(repeat: int) -> Row:
    """Digest chain of a 204,800-token prompt."""
    tokens = array("i", range(204_800))
    root = root_digest(b"", UNIT)
    best = _best(repeat, lambda: extend_digests([], root, tokens, UNIT))
    return "hashing", best / len(tokens), "ns/token", 8.0


def lookup(repeat: int, has_states: bool, num_others: int = 0) -> Row:
    """Match of a 200,000-token prompt that is cached, the worst cases having no state on it.

    States that other prompts left make each of its digests one that must be looked for.
    """
    scheduler = _scheduler(200_000 + num_others * 16_384, Retention())
    for other in range(num_others):
        _run(scheduler, f"other {other}", array("i", range(other + 1, other + 16_385)))
    prompt = array("i", range(200_000))
    _run(scheduler, "first", prompt)
    sequence = scheduler.cache.new_sequence("again", prompt)
    if not has_states:
        _forget_states(scheduler.cache, sequence)
    match = scheduler.cache.lookup(sequence)
    assert bool(match.hit) == has_states, "a case is what its name says"
    best = _best(20 * repeat, lambda: scheduler.cache.lookup(sequence))
    name = "lookup at 200k tokens" + ("" if has_states else ", no state on it")
    return name + (", others have some" if num_others else ""), best / 1e3, "us", 60.0


def _forget_states(cache: PrefixCache, sequence: Sequence) -> None:
    for digest in sequence.digests:
        checkpoint = cache.states.sealed.get(digest)
        if checkpoint is not None:
            cache.states.evict(checkpoint)


def scaling(repeat: int) -> list[Row]:
    """Planning and committing per new unit, at two sizes that differ by eight."""
    rows: list[Row] = []
    for tokens in (128_000, 1_024_000):
        prompt = array("i", range(tokens))
        digests = tuple(_scheduler(tokens, Retention()).cache.new_sequence("x", prompt).digests)
        best = min(_bookkeeping(prompt, digests) for _ in range(repeat))
        name = f"plan, commit and release a unit, {tokens // 1000}k tokens"
        rows.append((name, best / (tokens / UNIT) / 1e3, "us/unit", 3.0))
    return rows


def million(repeat: int) -> Row:
    """A 1,000,000-token prompt from its tokens to its end."""
    prompt = array("i", range(1_000_000))
    best = min(_bookkeeping(prompt, ()) for _ in range(repeat))
    return "1M-token prompt, hashing included", best / 1e6, "ms", 25.0


def simulator(path: Path, repeat: int) -> Row:
    """Replay of a Mooncake trace, prompt end and junctions."""
    requests = list(read_trace([path], "mooncake", 512))
    config = unlimited(CacheConfig(unit_tokens=512), requests)
    best = max(replay(config, requests).tokens_per_second for _ in range(repeat))
    return "simulator on the trace", best / 1e6, "Mtoken/s", 20.0


def _bookkeeping(prompt: "array[int]", digests: tuple[bytes, ...]) -> int:
    scheduler = _scheduler(len(prompt), Retention())
    started = process_time_ns()
    _run(scheduler, "one", prompt, digests)
    return process_time_ns() - started


def _scheduler(tokens: int, retention: Retention) -> Scheduler:
    config = CacheConfig(num_pages=tokens // (UNIT * 12) + 16, retention=retention)
    return Scheduler(SchedulerConfig(chunk_tokens=(16_384,)), PrefixCache(config))


def _run(
    scheduler: Scheduler, name: str, prompt: "array[int]", digests: tuple[bytes, ...] = ()
) -> None:
    scheduler.add(Request(name, prompt, 0, unit_digests=digests))
    while scheduler.has_work():
        plan = scheduler.schedule()
        results = [
            RowResult(row.request_id, (), tuple(export.position for export in row.exports))
            for row in plan.rows
        ]
        scheduler.commit(plan, results)


def _best(repeat: int, call: Callable[[], object]) -> int:
    best = 1 << 62
    for _ in range(repeat):
        started = process_time_ns()
        call()
        best = min(best, process_time_ns() - started)
    return best


if __name__ == "__main__":
    main()
