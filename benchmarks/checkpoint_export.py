"""Time to first token of the three ways to leave checkpoints: in the pass, or by cutting chunks.

A random K3 of 12 layers and width 512 on the CPU prefills one prompt through the real scheduler
and arena; rounds alternate between the modes, so that a busy machine slows all alike.

    OMP_NUM_THREADS=2 python benchmarks/checkpoint_export.py --tokens 8000
"""

import argparse
import json
import statistics
import tempfile
import time
from array import array
from dataclasses import replace
from pathlib import Path

import torch

from k3core.cache.coordinator import PrefixCache
from k3core.cache.layout import model_sizes, plan_layout
from k3core.cache.pools import PageArena
from k3core.cache.spec import CacheConfig, ExportMode
from k3core.engine.torch_runner import TorchRunner
from k3core.engine.words import EngineRequest
from k3core.kernels.registry import select_kernels
from k3core.model.text import TextModel
from k3core.scheduler.request import Request
from k3core.scheduler.scheduler import Scheduler, SchedulerConfig
from k3core.weights.loading import LoadOptions, load_text_model
from k3core.weights.random_checkpoint import random_config, random_text_model
from k3core.weights.saving import save_checkpoint
from k3wire.messages.sampling import SamplingParams

MODES: tuple[ExportMode, ...] = ("in_pass", "align", "partial")
UNIT, GRID, CHUNK = 128, 1536, 16_384


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = _model()
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    forwards: dict[str, list[int]] = {}
    for _ in range(args.rounds):
        for mode in MODES:
            seconds, forwards[mode] = prefill(model, mode, args.tokens)
            times[mode].append(seconds)
    medians = {mode: statistics.median(values) for mode, values in times.items()}
    report = {
        "model": "12 layers, width 512, 16 packed experts, 4 chosen",
        "tokens": args.tokens,
        "threads": torch.get_num_threads(),
        "ttft_s": medians,
        "forwards": forwards,
        "in_pass_against_align": 1 - medians["in_pass"] / medians["align"],
        "in_pass_against_partial": 1 - medians["in_pass"] / medians["partial"],
    }
    print(json.dumps(report, indent=1))


def prefill(model: TextModel, mode: ExportMode, tokens: int) -> tuple[float, list[int]]:
    """One cold prompt to its first token: seconds, and token counts of the forwards."""
    sizes = model_sizes(model.config, row_itemsize=4, conv_itemsize=4)
    layout = plan_layout(sizes, UNIT)
    pages = tokens // (UNIT * layout.page_units) + 8 * layout.num_groups + 4
    arena = PageArena(layout, pages, torch.float32, torch.float32)
    cache = CacheConfig(
        unit_tokens=UNIT,
        page_units=layout.page_units,
        num_pages=pages,
        state_groups=layout.num_groups,
        checkpoint_grid=GRID,
        export_mode=mode,
    )
    scheduler = Scheduler(SchedulerConfig(chunk_tokens=(CHUNK,)), PrefixCache(cache))
    runner = TorchRunner(model, arena)
    request = Request("one", array("i", [(7 * i) % 700 for i in range(tokens)]), 1)
    runner.begin(
        EngineRequest(request, SamplingParams(temperature=0.0, max_tokens=1, seed=0)), None
    )
    scheduler.add(request)
    lengths: list[int] = []
    started = time.perf_counter()
    while scheduler.has_work():
        plan = scheduler.schedule()
        lengths += [row.length for row in plan.rows]
        scheduler.commit(plan, runner.execute(plan))
    return time.perf_counter() - started, lengths


def _model() -> TextModel:
    config = replace(random_config("medium", 768), vision=None)
    device = torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        save_checkpoint(directory, config, random_text_model(config.text, 0, torch.float32), None)
        options = LoadOptions(device, torch.float32)
        return load_text_model(directory, config, select_kernels(device), options)


if __name__ == "__main__":
    main()
