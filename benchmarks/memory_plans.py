"""Which memory plan is best for which mix: the same bytes, the same trace, every plan.

    python benchmarks/memory_plans.py --trace mooncake_synthetic.jsonl.gz --gib 20,40,80

Bytes are one rank's of Kimi K3 at TP8. The two-pool plan is run at several splits, since
somebody has to choose one before the traffic is known.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from k3core.cache.layout import ModelSizes, plan_layout
from k3core.cache.spec import CacheConfig, Memory, Retention
from k3core.simulate.capacity import fit_layout
from k3core.simulate.trace import replay
from k3core.simulate.trace_formats import read_trace

# Kimi K3 at one rank of eight, rows of one byte an element.
SIZES = ModelSizes(24, 576, 576, 69, 12, 128, 4, 2)
UNIT = 512
MIXES = {
    "prompt end + second hit": Retention(),
    "dense + unit end": Retention(prompt_end=False, unit_end=True, dense=True),
}


def main() -> None:
    """Print one line a mix, capacity and plan."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--gib", default="20,40,80")
    parser.add_argument("--limit", type=int, default=0)
    args = parser.parse_args()
    requests = list(read_trace([args.trace], "mooncake", UNIT))
    requests = requests[: args.limit or len(requests)]
    layout = plan_layout(SIZES, UNIT)
    for mix, retention in MIXES.items():
        for gib in map(float, args.gib.split(",")):
            base = CacheConfig(unit_tokens=UNIT, export_alignment=1, retention=retention)
            flat = fit_layout(base, layout, int(gib * 2**30))
            flat = replace(flat, checkpoint_grid=1536)
            for name, config in _plans(flat):
                report = replay(config, requests)
                print(
                    f"{mix:24s} {gib:5.0f} GiB  {name:22s} hit {report.hit_rate:.4f}  "
                    f"refused {report.refused:4d}  moved {report.moved_pages:8d} pages  "
                    f"{report.wall_s:5.1f} s",
                    flush=True,
                )


def _plans(flat: CacheConfig) -> list[tuple[str, CacheConfig]]:
    plans = [("flat", flat)]
    for share in (0.25, 0.5, 0.75):
        states = int(flat.num_pages * share) // flat.state_groups
        rows = flat.num_pages - states * flat.state_groups
        pools = replace(flat, memory="two_pools", num_pages=rows, num_slots=states)
        plans.append((f"two pools, {share:.0%} states", pools))
    ends: tuple[Memory, ...] = ("two_ended_lazy", "two_ended_eager")
    return plans + [(memory, replace(flat, memory=memory)) for memory in ends]


if __name__ == "__main__":
    main()
