"""Whole-model speed on the CPU: fast kernels against the plain reference, in one run.

A random K3 of 12 layers and width 512 with packed experts. First both backends must agree on
logits; then prefill tokens per second and decode tokens per second at batch 1 and 8 are the
medians of alternating rounds, so that a busy machine slows both sides alike.

    OMP_NUM_THREADS=2 python benchmarks/model_cpu.py

The reference computes every row of every layer, as the plain modules do: a tap keeps it from the
shortcut of the last layer, which is the model's and not the kernels'.

Each side has two threads: the fast one those of its kernels, the reference torch's. Torch has one
while the kernels run, because a second one of its own would spin on their core.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from k3core.batch import CacheViews, ForwardBatch
from k3core.config import ModelConfig
from k3core.engine.single_sequence import UNIT_TOKENS, allocate_views
from k3core.kernels.registry import select_kernels
from k3core.model.text import TextModel
from k3core.weights.loading import LoadOptions, load_text_model
from k3core.weights.random_checkpoint import random_config, random_text_model
from k3core.weights.saving import save_checkpoint

NUM_BASE_RANKS = 768
PROMPT = 256
# Logits of random weights have a scale of about 3; both sides round in float32.
AGREEMENT = 2e-4
BATCHES = (1, 8)
# Prefill and decode against the reference.
GOALS = {"prefill": 3.0, "decode": 2.0}


class Bench:
    """One backend's model with a cache for a batch of equal sequences."""

    def __init__(self, model: TextModel, batch: int, max_tokens: int, *, is_plain: bool) -> None:
        self.model = model
        self.taps = (f"layer{model.config.num_layers - 1}.stream",) if is_plain else ()
        units = -(-max_tokens // UNIT_TOKENS)
        device = torch.device("cpu")
        self.views: CacheViews = allocate_views(
            model.config, units * batch, batch, model.embed.dtype, device
        )
        self.tables = torch.arange(units * batch, dtype=torch.int32).reshape(batch, units)
        num_groups = len(self.views.group_of_layer)
        self.pages = torch.arange(batch, dtype=torch.int32).unsqueeze(1).repeat(1, num_groups)
        self.batch = batch

    def step(self, token_ids: torch.Tensor, context: int) -> torch.Tensor:
        """Feed [batch, n] tokens; logits of each sequence's last row."""
        count = token_ids.shape[1]
        starts = tuple(range(0, self.batch * count + 1, count))
        batch = ForwardBatch(
            token_ids=token_ids.flatten(),
            query_starts=starts,
            context_lengths=(context,) * self.batch,
            unit_tables=self.tables,
            state_pages=self.pages,
            logits_rows=tuple(end - 1 for end in starts[1:]),
        )
        return self.model(batch, self.views, self.taps).logits


def load(backend: str, directory: Path, config: ModelConfig, dtype: torch.dtype) -> TextModel:
    """The checkpoint on one backend."""
    device = torch.device("cpu")
    return load_text_model(
        directory, config, select_kernels(device, backend), LoadOptions(device, dtype)
    )


def time_s(work: Callable[[], object]) -> float:
    """Seconds that a piece of work takes."""
    start = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start) / 1e9


def measure(models: dict[str, TextModel], batch: int, rounds: int, steps: int) -> dict[str, object]:
    """Prefill and decode speed of each backend, alternating."""
    ids = torch.arange(batch * (PROMPT + steps)).reshape(batch, -1) * 7919 % 700
    benches = {
        name: Bench(model, batch, PROMPT + steps, is_plain=name == "reference")
        for name, model in models.items()
    }
    prefill: dict[str, list[float]] = {name: [] for name in models}
    decode: dict[str, list[float]] = {name: [] for name in models}
    num_threads = torch.get_num_threads()
    for number in range(rounds + 1):
        for name, bench in benches.items():
            torch.set_num_threads(num_threads if name == "reference" else 1)
            prefill_s = time_s(lambda bench=bench: bench.step(ids[:, :PROMPT], 0))

            def run(bench: Bench = bench) -> None:
                for position in range(PROMPT, PROMPT + steps):
                    bench.step(ids[:, position : position + 1], position)

            decode_s = time_s(run)
            # The first round warms caches and allocators.
            if number:
                prefill[name].append(batch * PROMPT / prefill_s)
                decode[name].append(batch * steps / decode_s)
    torch.set_num_threads(num_threads)
    result: dict[str, object] = {"batch": batch}
    for kind, rates in (("prefill", prefill), ("decode", decode)):
        medians = {name: statistics.median(values) for name, values in rates.items()}
        result[f"{kind}_tokens_per_s"] = {name: round(rate, 1) for name, rate in medians.items()}
        result[f"{kind}_speedup"] = round(medians["auto"] / medians["reference"], 2)
    return result


def disagreement(models: dict[str, TextModel]) -> float:
    """Largest difference of logits over a prompt, chunks and decode steps."""
    ids = torch.arange(80).unsqueeze(0) * 7919 % 700
    outputs: dict[str, list[torch.Tensor]] = {name: [] for name in models}
    for name, model in models.items():
        bench = Bench(model, 1, 80, is_plain=name == "reference")
        for low, high in ((0, 50), (50, 70), *((t, t + 1) for t in range(70, 80))):
            outputs[name].append(bench.step(ids[:, low:high], low))
    gaps = torch.cat(outputs["auto"]) - torch.cat(outputs["reference"])
    return float(gaps.abs().max())


def main(argv: Sequence[str] | None = None) -> int:
    """Print one JSON object; 1 where the backends disagree or a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="decode steps a round")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args(argv)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[args.dtype]
    config = replace(random_config("medium", NUM_BASE_RANKS), vision=None)
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        save_checkpoint(directory, config, random_text_model(config.text, 0, torch.float32), None)
        models = {name: load(name, directory, config, dtype) for name in ("auto", "reference")}
        gap = disagreement(models)
        if dtype == torch.float32 and not gap <= AGREEMENT:
            print(f"backends disagree by {gap}, nothing is measured", file=sys.stderr)
            return 1
        results = [measure(models, batch, args.rounds, args.steps) for batch in BATCHES]
    report = {
        "model": "12 layers, width 512, 16 packed experts, 4 chosen",
        "backend": select_kernels(torch.device("cpu")).reason,
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
        "prompt_tokens": PROMPT,
        "disagreement": gap,
        "results": results,
    }
    print(json.dumps(report, indent=1))
    missed = [
        (row["batch"], kind)
        for row in results
        for kind, goal in GOALS.items()
        if float(str(row[f"{kind}_speedup"])) < goal
    ]
    for batch, kind in missed:
        print(f"batch {batch}: {kind} misses {GOALS[kind]}x", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
