"""Speed of Kimi Delta Attention on the CPU: the chosen backend against an eager token loop.

One layer of 8 heads, K = V = 64, convolution and gates included on both sides, two threads.
First both sides must agree, states and exports too, or nothing is measured. Then prefill,
decode at batch 1, 8 and 32, and prefill with 16 exports are timed in alternating rounds, so
that a busy machine slows both sides alike; ratios are of medians.

    OMP_NUM_THREADS=2 python benchmarks/kda_cpu.py [--json]
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from k3core.kernels.interface import (
    KdaInputs,
    KdaPlan,
    KdaStates,
    KdaWeights,
    Kernels,
)
from k3core.kernels.registry import reference_kernels, select_kernels

NUM_HEADS = 8
KEY_DIM = 64
VALUE_DIM = 64
NUM_TAPS = 4
LOWER_BOUND = -5.0
CHANNELS = NUM_HEADS * (2 * KEY_DIM + VALUE_DIM)
NUM_PAGES = 64
PROMPT = 2048
# The eager loop's speed does not depend on the length; a short one keeps the run short.
EAGER_PROMPT = 256
BATCHES = (1, 8, 32)
NUM_EXPORTS = 16
# Two float32 sides, each a few units in the last place from the truth; values are about 1.
AGREEMENT = 2e-5
GOALS = {"prefill": 6.0, "decode": 6.0}
EXPORT_LIMIT = 1.3


@dataclass(frozen=True)
class Case:
    """Arguments of one call."""

    inputs: KdaInputs
    plan: KdaPlan


def draw(seed: int, *size: int) -> torch.Tensor:
    """Normal numbers that depend on the seed alone."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def make_weights() -> KdaWeights:
    """The layer's small weights."""
    return KdaWeights(
        draw(1, CHANNELS, NUM_TAPS) * 0.5,
        draw(2, NUM_HEADS) * 0.5,
        draw(3, NUM_HEADS, KEY_DIM),
        LOWER_BOUND,
    )


def make_states() -> KdaStates:
    """Pages with states of a usual size in them."""
    return KdaStates(
        draw(4, NUM_PAGES, NUM_HEADS, VALUE_DIM, KEY_DIM) * 0.1,
        draw(5, NUM_PAGES, NUM_TAPS - 1, CHANNELS),
    )


def make_case(lengths: Sequence[int], num_exports: int = 0) -> Case:
    """Chunks on pages 0, 1, ...; exports evenly over the first chunk, on the last pages."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    exports = tuple(
        (0, lengths[0] * (i + 1) // num_exports, NUM_PAGES - 1 - i) for i in range(num_exports)
    )
    pages = tuple(range(len(lengths)))
    has_state = (True,) * len(lengths)
    plan = KdaPlan(
        starts=tuple(starts),
        has_state=has_state,
        pages=pages,
        page_ids=torch.tensor(pages),
        state_mask=torch.tensor(has_state),
        exports=exports,
    )
    total = starts[-1]
    gate = draw(7, total, NUM_HEADS, KEY_DIM) * 2
    return Case(KdaInputs(draw(6, total, CHANNELS), gate, draw(8, total, NUM_HEADS)), plan)


def disagreement(fast: Kernels, eager: Kernels) -> float:
    """Largest difference of outputs and of all pages, over prefill, exports and decode."""
    weights, worst = make_weights(), 0.0
    for name, case in (
        ("kda_prefill", make_case([97, 1, 30], num_exports=4)),
        ("kda_decode", make_case([1] * 9)),
    ):
        sides: list[tuple[torch.Tensor, ...]] = []
        for kernels in (fast, eager):
            states = make_states()
            out = getattr(kernels, name)(case.inputs, weights, case.plan, states)
            sides.append((out, states.recurrent, states.conv))
        for ours, theirs in zip(*sides, strict=True):
            # Not max(): a NaN must come out as one.
            gap = (ours - theirs).abs().max().item()
            worst = gap if not gap <= worst else worst
    return worst


def time_s(work: Callable[[], object], repeats: int) -> float:
    """Seconds that one of `repeats` runs takes."""
    start = time.perf_counter_ns()
    for _ in range(repeats):
        work()
    return (time.perf_counter_ns() - start) / 1e9 / repeats


def race(sides: dict[str, tuple[Callable[[], object], int]], rounds: int) -> dict[str, float]:
    """Median seconds of each side's work over alternating rounds; one more warms up."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, (work, repeats) in sides.items():
            taken = time_s(work, repeats)
            if number:
                times[name].append(taken)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(fast: Kernels, eager: Kernels, rounds: int) -> dict[str, object]:
    """All figures of the report."""
    weights, states = make_weights(), make_states()
    long, short = make_case([PROMPT]), make_case([EAGER_PROMPT])
    exporting = make_case([PROMPT], NUM_EXPORTS)

    def prefill(kernels: Kernels, case: Case) -> Callable[[], object]:
        return lambda: kernels.kda_prefill(case.inputs, weights, case.plan, states)

    def decode(kernels: Kernels, case: Case) -> Callable[[], object]:
        return lambda: kernels.kda_decode(case.inputs, weights, case.plan, states)

    taken = race(
        {
            "fast": (prefill(fast, long), 3),
            "exporting": (prefill(fast, exporting), 3),
            "eager": (prefill(eager, short), 1),
        },
        rounds,
    )
    fast_rate, eager_rate = PROMPT / taken["fast"], EAGER_PROMPT / taken["eager"]
    figures: dict[str, object] = {
        "prefill_tokens_per_s": {"fast": round(fast_rate), "eager": round(eager_rate)},
        "prefill_speedup": round(fast_rate / eager_rate, 2),
        "export_cost": round(taken["exporting"] / taken["fast"], 3),
    }
    for batch in BATCHES:
        case = make_case([1] * batch)
        taken = race({"fast": (decode(fast, case), 50), "eager": (decode(eager, case), 10)}, rounds)
        figures[f"decode_{batch}_us"] = {
            name: round(seconds * 1e6, 1) for name, seconds in taken.items()
        }
        figures[f"decode_{batch}_speedup"] = round(taken["eager"] / taken["fast"], 2)
    return figures


def missed(figures: dict[str, object]) -> list[str]:
    """The goals that were not reached."""
    wanted = {"prefill_speedup": GOALS["prefill"]}
    wanted |= {f"decode_{batch}_speedup": GOALS["decode"] for batch in BATCHES}
    names = [name for name, goal in wanted.items() if not float(str(figures[name])) >= goal]
    if not float(str(figures["export_cost"])) <= EXPORT_LIMIT:
        names.append("export_cost")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 1 where the sides disagree or a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernels", default="auto", help="backend to measure")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    torch.set_num_threads(2)
    fast, eager = select_kernels(torch.device("cpu"), args.kernels), reference_kernels()
    with torch.inference_mode():
        gap = disagreement(fast, eager)
        if not gap <= AGREEMENT:
            print(f"{fast.name} and the eager loop differ by {gap}: no figures", file=sys.stderr)
            return 1
        figures = measure(fast, eager, args.rounds)
    report: dict[str, object] = {
        "layer": f"H={NUM_HEADS} K={KEY_DIM} V={VALUE_DIM}, float32",
        "backend": f"{fast.name}: {fast.reason}",
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
        "disagreement": gap,
        **figures,
        "missed": missed(figures),
    }
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        for name, value in report.items():
            print(f"{name:24} {value}")
    return 1 if report["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
