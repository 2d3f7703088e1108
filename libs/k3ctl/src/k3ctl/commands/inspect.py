"""`k3 inspect`: what a checkpoint holds, what its cache costs, what fits in a given memory."""

import argparse
import sys
from itertools import groupby
from pathlib import Path

from k3core.cache.layout import ModelSizes, PageLayout, model_sizes, plan_layout, raw_state_bytes
from k3core.cache.spec import CacheError
from k3core.config import ConfigError, ModelConfig
from k3core.weights.config_file import load_config
from k3core.weights.inspection import DTYPE_BYTES, TensorCount, count_tensors
from k3ctl.subparsers import Subparsers

ROW_DTYPES = {"float32": 4, "bfloat16": 2, "fp8": 1}
# Sequence lengths whose number in flight is worth knowing, in tokens.
SHOWN_LENGTHS = (8_192, 131_072, 1_048_576)


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("inspect", help="what a checkpoint holds and what it needs")
    parser.add_argument("directory", type=Path, help="checkpoint, or a folder with its config.json")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--memory", type=float, help="memory of one rank for the cache, GB (1e9)")
    parser.add_argument("--row-dtype", choices=tuple(ROW_DTYPES), help="of cached MLA rows")
    parser.add_argument("--unit", type=int, default=128, help="match unit, tokens")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; 2 where the config or the sizes do not fit."""
    try:
        config = load_config(args.directory)
        row_bytes = ROW_DTYPES[args.row_dtype] if args.row_dtype else DTYPE_BYTES[config.dtype]
        sizes = model_sizes(config.text, args.tp, row_bytes, DTYPE_BYTES[config.dtype])
        layout = plan_layout(sizes, args.unit)
    except (ConfigError, CacheError) as error:
        print(f"k3 inspect: {error}", file=sys.stderr)
        return 2
    print(_layers(config))
    print(_tensors(count_tensors(config)))
    print(_cache(sizes, layout, args.tp))
    if args.memory is not None:
        print(_capacity(layout, args.memory))
    return 0


def _layers(config: ModelConfig) -> str:
    text = config.text
    runs = [f"{kind.upper()}x{len(list(group))}" for kind, group in groupby(text.attention)]
    if len(runs) > 8:
        runs = [*runs[:4], "...", *runs[-2:]]
    lines = [
        f"layers          {text.num_layers}: {len(text.kda_layers)} KDA, "
        f"{len(text.mla_layers)} MLA ({' '.join(runs)})",
        f"width           {text.hidden_size}, vocabulary {text.vocab_size:,}, "
        f"stored as {config.dtype}",
    ]
    if text.moe is not None:
        moe = text.moe
        form = "plain" if moe.mxfp4_group is None else f"MXFP4, groups of {moe.mxfp4_group}"
        lines.append(
            f"experts         {moe.num_experts} choose {moe.experts_per_token}, "
            f"{moe.num_shared_experts} shared, {form}"
        )
    block = text.attn_res_block_size
    lines.append(f"depth mixing    {f'blocks of {block} layers' if block else 'none'}")
    vision = config.vision
    lines.append(f"vision          {f'{vision.num_layers} layers' if vision else 'none'}")
    return "\n".join(lines)


def _tensors(counts: tuple[TensorCount, ...]) -> str:
    lines = ["", f"{'kind':<20} {'dtype':<9} {'tensors':>9} {'parameters':>21} {'bytes':>21}"]
    lines += [
        f"{c.kind:<20} {c.dtype:<9} {c.num_tensors:>9,} {c.num_parameters:>21,} {c.num_bytes:>21,}"
        for c in counts
    ]
    sums = [sum(getattr(c, key) for c in counts) for key in TOTALS]
    lines.append(f"{'total':<20} {'':<9} {sums[0]:>9,} {sums[1]:>21,} {sums[2]:>21,}")
    return "\n".join(lines)


TOTALS = ("num_tensors", "num_parameters", "num_bytes")


def _cache(sizes: ModelSizes, layout: PageLayout, tp: int) -> str:
    per_token = sizes.mla_layers * sizes.row_bytes
    layer = sizes.recurrent_bytes + sizes.conv_bytes
    page_tokens = layout.page_units * layout.unit_tokens
    return "\n".join(
        (
            "",
            f"cache of one rank of {tp}",
            f"MLA row         {sizes.row_elements} elements, {sizes.row_bytes:,} B a layer, "
            f"{per_token:,} B a token",
            f"KDA state       {sizes.recurrent_bytes:,} + {sizes.conv_bytes:,} B a layer, "
            f"{sizes.kda_layers * layer:,} B in all ({raw_state_bytes(sizes):,} B as stored)",
            f"page            {layout.page_bytes:,} B: {page_tokens:,} tokens "
            f"({layout.page_units} units of {layout.unit_tokens}), or one of "
            f"{layout.num_groups} groups of a state",
        )
    )


def _capacity(layout: PageLayout, memory_gb: float) -> str:
    num_pages = int(memory_gb * 1e9) // layout.page_bytes
    page_tokens = layout.page_units * layout.unit_tokens
    lines = ["", f"in {memory_gb:g} GB      {num_pages:,} pages"]
    if layout.sizes.mla_layers:
        lines.append(f"                {num_pages * page_tokens:,} tokens of MLA rows, no states")
    if layout.num_groups:
        lines.append(f"                {num_pages // layout.num_groups:,} KDA states, no rows")
    for length in SHOWN_LENGTHS:
        row_pages = -(-length // page_tokens) if layout.sizes.mla_layers else 0
        needed = max(1, row_pages + layout.num_groups)
        lines.append(f"                {num_pages // needed:,} sequences of {length:,} tokens")
    return "\n".join(lines)
