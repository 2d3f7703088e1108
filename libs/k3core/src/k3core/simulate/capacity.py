"""Hit rate against capacity, policy by policy: what a given memory is worth."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from k3core.cache.layout import PageLayout
from k3core.cache.spec import CacheConfig, Retention
from k3core.simulate.trace import TraceReport, replay, unlimited
from k3core.simulate.trace_formats import TraceRequest


@dataclass(frozen=True, slots=True)
class Policy:
    """A named choice of what to keep and what to give up."""

    name: str
    config: CacheConfig


@dataclass(frozen=True, slots=True)
class Point:
    """One replay: a policy at a capacity in pages (0: unlimited)."""

    policy: str
    pages: int
    report: TraceReport


def fit_layout(config: CacheConfig, layout: PageLayout, memory_bytes: int) -> CacheConfig:
    """The same policies in a flat arena of real page sizes that fills a memory.

    Args:
        config: policies; its sizes are replaced.
        layout: of one rank.
        memory_bytes: given to the cache on that rank.
    """
    return replace(
        config,
        memory="flat",
        unit_tokens=layout.unit_tokens,
        page_units=layout.page_units,
        num_pages=max(1, memory_bytes // layout.page_bytes),
        state_groups=max(1, layout.num_groups),
        int8_groups=max(1, layout.int8_groups),
        page_bytes=layout.page_bytes,
    )


def usual_policies(config: CacheConfig) -> list[Policy]:
    """The retention policies worth comparing, each with the eviction orders it is used with."""
    ends = replace(config, retention=Retention())
    dense = replace(config, retention=Retention(prompt_end=False, unit_end=True, dense=True))
    return [
        Policy("prompt end", replace(ends, promotion="never")),
        Policy("prompt end + second hit", replace(ends, promotion="second_hit")),
        Policy(
            "second hit + Marconi eviction",
            replace(ends, promotion="second_hit", eviction="marconi"),
        ),
        Policy("dense + unit end", replace(dense, promotion="never")),
        Policy("prompt end + free slots", replace(ends, retention=Retention(opportunistic=True))),
    ]


def sweep(
    policies: Sequence[Policy], requests: list[TraceRequest], capacities: Sequence[int]
) -> list[Point]:
    """Replay a trace under each policy at each capacity.

    Args:
        policies: what to compare; each config's memory plan is used as it is.
        requests: of one trace at the policies' unit.
        capacities: pages; 0 for no bound.
    """
    points: list[Point] = []
    for policy in policies:
        for pages in capacities:
            config = unlimited(policy.config, requests)
            if pages:
                config = replace(policy.config, num_pages=pages)
                if config.memory == "two_pools":
                    config = replace(config, num_slots=max(2, pages // 4), num_pages=pages)
            points.append(Point(policy.name, pages, replay(config, requests)))
    return points


def plot(points: Sequence[Point], path: Path, page_bytes: int) -> None:
    """Draw hit rate against capacity, one line a policy.

    Args:
        points: of `sweep`.
        path: image to write; its suffix names the format.
        page_bytes: of a page, for the axis; 0 to label it in pages.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    # A picture is optional and its library is large: nothing else here needs it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    scale = page_bytes / 2**30 if page_bytes else 1.0
    for name in dict.fromkeys(point.policy for point in points):
        line = sorted((p.pages, p.report.hit_rate) for p in points if p.policy == name and p.pages)
        axes.plot(
            [pages * scale for pages, _ in line], [rate for _, rate in line], "o-", label=name
        )
    ceiling = max((p.report.mla_match_rate for p in points), default=0.0)
    axes.axhline(ceiling, color="grey", linestyle=":", label="all rows, every state")
    axes.set_xscale("log")
    sizes = sorted({point.pages * scale for point in points if point.pages})
    axes.set_xticks(sizes, [f"{size:.3g}" for size in sizes])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("cache capacity, GiB" if page_bytes else "cache capacity, pages")
    axes.set_ylabel("share of input tokens reused")
    axes.legend()
    figure.savefig(path)
