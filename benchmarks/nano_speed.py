"""How fast the demo checkpoint loads, reads and writes through the engine, on this machine.

Loading is timed in fresh processes, imports apart: from the checkpoint's directory to an engine
that takes requests. Reading is a prompt of 4,096 tokens, writing 128 tokens at batch 1, both through
scheduler, cache, model and sampler. The plain reference kernels do the same in the same run, in
turns, as the baseline, and both must first write the same greedy answer.

    OMP_NUM_THREADS=2 python benchmarks/nano_speed.py [--checkpoint checkpoints/k3-nano]
        [--rounds 5]

Ends with 1 if an answer differs or a goal is missed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from k3core.engine.assembly import ModelOptions
from k3core.engine.local import LocalAnswer, LocalEngine, LocalRequest
from k3core.engine.parts import EngineSizes
from k3wire.messages.sampling import SamplingParams

SHIPPED = Path(__file__).parents[1] / "checkpoints" / "k3-nano"
PROMPT, ANSWER = 4096, 128
GOALS = {"load_s": 2.0, "prefill_tokens_per_s": 4000.0, "decode_tokens_per_s": 150.0}
ARENA_BYTES = 256 << 20
LOADING = """
import sys, time
from pathlib import Path
from k3core.engine.local import LocalEngine
start = time.perf_counter()
LocalEngine(Path(sys.argv[1]))
print(time.perf_counter() - start)
"""


class Side:
    """One backend's engine; every request has a salt of its own, so nothing is reused."""

    def __init__(self, checkpoint: Path, kernels: str) -> None:
        options = ModelOptions(checkpoint, kernels=kernels)
        self._engine = LocalEngine(checkpoint, EngineSizes(arena_bytes=ARENA_BYTES), options)
        self._num_asked = 0

    def answer(self, num_tokens: int, prompt: int) -> tuple[float, LocalAnswer]:
        """Seconds for one prompt and its greedy answer of a given length, and the answer."""
        self._num_asked += 1
        ids = [(position * 7919) % 700 for position in range(prompt)]
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
        start = time.perf_counter()
        request = LocalRequest(ids, sampling, salt=f"turn {self._num_asked}")
        said = self._engine.generate_all([request])[0]
        return time.perf_counter() - start, said

    def rates(self) -> tuple[float, float]:
        """Tokens a second read and written. A first token is part of reading."""
        read_s, _ = self.answer(1, PROMPT)
        short_s, _ = self.answer(1, 64)
        whole_s, said = self.answer(ANSWER + 1, 64)
        return PROMPT / read_s, (len(said.token_ids) - 1) / (whole_s - short_s)


def load_seconds(checkpoint: Path) -> float:
    """Of loading in a process of its own, imports not counted."""
    run = subprocess.run(
        [sys.executable, "-c", LOADING, str(checkpoint)], check=True, capture_output=True, text=True
    )
    return float(run.stdout)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=SHIPPED)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    loads = [load_seconds(args.checkpoint) for _ in range(args.rounds)]
    sides = {name: Side(args.checkpoint, name) for name in ("auto", "reference")}
    answers = {name: side.answer(ANSWER, 256)[1].token_ids for name, side in sides.items()}
    if answers["auto"] != answers["reference"]:
        print("the two backends answer differently, nothing is measured", file=sys.stderr)
        return 1
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, side in sides.items():
            rates[name].append(side.rates())
    report: dict[str, object] = {"threads": os.environ.get("OMP_NUM_THREADS", "as torch likes")}
    report["load_s"] = statistics.median(loads)
    for place, kind in enumerate(("prefill", "decode")):
        medians = {n: statistics.median(r[place] for r in rows) for n, rows in rates.items()}
        report[f"{kind}_tokens_per_s"] = medians["auto"]
        report[f"{kind}_speedup"] = medians["auto"] / medians["reference"]
    print(
        json.dumps({k: round(v, 3) if type(v) is float else v for k, v in report.items()}, indent=1)
    )
    is_met = float(str(report["load_s"])) < GOALS["load_s"] and all(
        float(str(report[k])) >= GOALS[k] for k in GOALS if k != "load_s"
    )
    if not is_met:
        print(f"a goal is missed: {GOALS}", file=sys.stderr)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
