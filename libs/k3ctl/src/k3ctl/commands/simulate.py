"""`k3 simulate`: run cache scenarios with exact checks, or replay a trace through the cache."""

import argparse
import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import msgspec

from k3core.cache.layout import ModelSizes, PageLayout, model_sizes, plan_layout, raw_state_bytes
from k3core.cache.spec import CacheConfig, CacheError, Codec, Draft, Eviction, ExportMode, Promotion
from k3core.config import ConfigError
from k3core.simulate.capacity import fit_layout, plot, sweep, usual_policies
from k3core.simulate.scenario_file import ScenarioError, read_cases, read_retention
from k3core.simulate.steps import run_case
from k3core.simulate.trace import replay, unlimited
from k3core.simulate.trace_formats import (
    TraceError,
    TraceFormat,
    TraceRequest,
    block_tokens,
    read_trace,
)
from k3core.weights.config_file import load_config
from k3ctl.commands.inspect import ROW_DTYPES
from k3ctl.subparsers import Subparsers

# Kimi K3 at one rank of eight with rows of one byte an element: 69 KDA and 24 MLA layers, 96
# heads of 128. Source: config.json of the release, architecture table.
K3_TP = 8
K3_TP8 = ModelSizes(
    mla_layers=24,
    row_elements=576,
    row_bytes=576,
    kda_layers=69,
    state_heads=12,
    head_dim=128,
    conv_width=4,
    conv_itemsize=2,
)

# How the published counts of each trace were made.
_DROP_MATCH = {"agent-sessions": "writer"}


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("simulate", help="run cache scenarios, or replay a trace")
    what = parser.add_argument_group("what to run")
    what.add_argument("--scenario", type=Path, action="append", default=[], help="JSON file")
    what.add_argument("--trace", type=Path, action="append", default=[], help="file or folder")
    what.add_argument("--format", choices=get_args(TraceFormat), default="mooncake")
    what.add_argument("--limit", type=int, default=0, help="first requests of a trace only")
    policy = parser.add_argument_group("policies of a trace replay")
    policy.add_argument("--unit", type=int, default=0, help="match unit, tokens")
    policy.add_argument(
        "--grid",
        "--checkpoint-grid",
        type=int,
        default=0,
        help="tokens a state block spans; the unit if absent",
    )
    policy.add_argument(
        "--retention",
        default="prompt_end",
        help="such as prompt_end,interval:8192, or a scenario's JSON list; 'none' for none",
    )
    policy.add_argument("--promotion", choices=get_args(Promotion), default="second_hit")
    policy.add_argument("--draft", choices=get_args(Draft), default="off")
    policy.add_argument(
        "--replay-tokens", type=int, default=1, help="tokens left to compute under --draft replay"
    )
    policy.add_argument(
        "--drop-match",
        choices=("law", "writer"),
        help="what a dropped unit must match: any unit that is known, or one that a writer of the "
        "state went on with; absent: writer for agent-sessions, law otherwise",
    )
    policy.add_argument("--partial-hits", choices=("true", "false"), default="true")
    policy.add_argument("--path-cap", type=int, default=-1)
    policy.add_argument("--states-per-session", type=int, default=0)
    policy.add_argument("--eviction", choices=get_args(Eviction), default="lru")
    policy.add_argument("--codec", choices=get_args(Codec), default="raw")
    policy.add_argument("--export-mode", choices=get_args(ExportMode), default="in_pass")
    policy.add_argument("--export-alignment", type=int, default=16)
    policy.add_argument("--chunk-tokens", type=int, default=1 << 30)
    _add_sizes(parser)
    parser.set_defaults(run=run)


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    size = parser.add_argument_group("sizes; unlimited if none is given")
    size.add_argument("--pages", type=int, default=0, help="pages of MLA rows")
    size.add_argument("--page-units", type=int, default=12, help="units a page")
    size.add_argument("--slots", type=int, default=0, help="states; as many as pages if 0")
    size.add_argument(
        "--memory-gib", type=float, default=0.0, help="one rank's cache, in pages of the model"
    )
    size.add_argument("--config", type=Path, help="checkpoint folder; Kimi K3 at TP8 if absent")
    size.add_argument("--tp", type=int, default=K3_TP, help="ranks that share the model")
    size.add_argument(
        "--row-dtype",
        choices=tuple(ROW_DTYPES),
        help="of cached MLA rows; absent: fp8 for Kimi K3, bfloat16 with --config",
    )
    size.add_argument(
        "--state-bytes", type=int, default=0, help="for byte totals; the model's if 0"
    )
    size.add_argument(
        "--row-bytes", type=int, default=0, help="of a token in all layers; the model's if 0"
    )
    size.add_argument(
        "--plot", type=Path, help="picture of hit rate against capacity, a line a policy"
    )
    size.add_argument("--plot-gib", default="4,8,16,32,64,128", help="capacities to draw")


def run(args: argparse.Namespace) -> int:
    """Print one JSON object a case or trace; 1 if an expectation fails, 2 if a file is no good."""
    if not args.scenario and not args.trace:
        print("k3 simulate: give --scenario or --trace", file=sys.stderr)
        return 2
    status = 0
    for path in args.scenario:
        try:
            status = max(status, _run_scenario(path))
        except (MemoryError, OverflowError):
            print(f"k3 simulate: {path}: larger than this machine holds", file=sys.stderr)
            status = 2
        except RecursionError:
            print(f"k3 simulate: {path}: nested too deeply", file=sys.stderr)
            status = 2
        except (ScenarioError, CacheError, OSError, UnicodeError, json.JSONDecodeError) as error:
            print(f"k3 simulate: {path}: {error}", file=sys.stderr)
            status = 2
    if args.trace:
        try:
            _run_trace(args)
        except (ScenarioError, TraceError, CacheError, ConfigError, OSError, ValueError) as error:
            print(f"k3 simulate: {error}", file=sys.stderr)
            status = 2
    return status


def _run_scenario(path: Path) -> int:
    status = 0
    for case in read_cases(json.loads(path.read_text())):
        result = run_case(case)
        print(json.dumps(result))
        for failure in result["failures"][:3]:
            print(f"k3 simulate: {case.name}: {failure}", file=sys.stderr)
            status = 1
    return status


def _check_sizes(args: argparse.Namespace) -> None:
    """Refuse what would fail only after a replay of minutes, or be read as something else.

    Raises:
        ValueError: naming the option.
    """
    for name in ("limit", "unit", "grid", "pages", "slots", "memory_gib", "states_per_session"):
        if getattr(args, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')} must not be {getattr(args, name)}")
    for name in ("page_units", "chunk_tokens", "tp"):
        if getattr(args, name) < 1:
            raise ValueError(
                f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}"
            )
    if args.memory_gib and (args.pages or args.slots):
        raise ValueError("give --memory-gib, or --pages and --slots, not both")
    if args.config is None and args.tp != K3_TP:
        raise ValueError(f"--tp {args.tp} needs --config: without it sizes are K3's at TP{K3_TP}")
    if args.plot is None:
        return
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed")
    if not args.plot.parent.is_dir():
        raise ValueError(f"--plot: there is no folder {args.plot.parent}")
    _capacities_gib(args.plot_gib)


def _capacities_gib(text: str) -> list[float]:
    try:
        sizes = [float(each) for each in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(0 < size < float("inf") for size in sizes):
        raise ValueError(f"--plot-gib is a list of sizes such as 4,16,64, not {text!r}")
    return sizes


def _run_trace(args: argparse.Namespace) -> None:
    _check_sizes(args)
    sizes, layout = _model(args)
    unit = args.unit or max(layout.unit_tokens, block_tokens(args.format))
    layout = plan_layout(sizes, unit)
    config = _config(args, unit)
    requests = list(read_trace(args.trace, args.format, unit))
    if args.limit:
        requests = requests[: args.limit]
    if not requests:
        raise ValueError("the trace holds no request")
    if args.memory_gib:
        fitted = fit_layout(config, layout, int(args.memory_gib * 2**30))
    elif args.pages:
        slots = args.slots or args.pages
        fitted = replace(config, memory="two_pools", num_pages=args.pages, num_slots=slots)
    else:
        fitted = unlimited(config, requests)
        if args.slots:
            fitted = replace(fitted, num_slots=args.slots)
    report = replay(
        fitted,
        requests,
        args.chunk_tokens,
        args.states_per_session,
        args.state_bytes or raw_state_bytes(sizes),
        args.row_bytes or sizes.mla_layers * sizes.row_bytes,
    )
    print(msgspec.json.encode(report).decode())
    if report.refused:
        print(
            f"k3 simulate: {report.refused} of {report.refused + report.requests} requests do not "
            "fit into the cache at all; they are not in the figures",
            file=sys.stderr,
        )
    if args.plot:
        _plot(args, config, layout, requests)


def _plot(
    args: argparse.Namespace, config: CacheConfig, layout: PageLayout, requests: list[TraceRequest]
) -> None:
    flat = fit_layout(config, layout, 1)
    capacities = [int(gib * 2**30) // layout.page_bytes for gib in _capacities_gib(args.plot_gib)]
    points = sweep(usual_policies(flat), requests, capacities)
    for point in points:
        row = {"policy": point.policy, "pages": point.pages, "hit_rate": point.report.hit_rate}
        print(json.dumps(row))
    plot(points, args.plot, layout.page_bytes)


def _model(args: argparse.Namespace) -> tuple[ModelSizes, PageLayout]:
    if args.config is None:
        itemsize = ROW_DTYPES[args.row_dtype or "fp8"]
        sizes = replace(K3_TP8, row_bytes=K3_TP8.row_elements * itemsize)
        return sizes, plan_layout(sizes)
    itemsize = ROW_DTYPES[args.row_dtype or "bfloat16"]
    sizes = model_sizes(load_config(args.config).text, args.tp, itemsize)
    return sizes, plan_layout(sizes)


def _config(args: argparse.Namespace, unit: int) -> CacheConfig:
    if args.retention.startswith("["):
        items = _json_list(args.retention)
    else:
        items = [_rule(word) for word in args.retention.split(",") if word and word != "none"]
    return CacheConfig(
        unit_tokens=unit,
        page_units=args.page_units,
        checkpoint_grid=args.grid or unit,
        export_alignment=args.export_alignment,
        export_mode=args.export_mode,
        retention=read_retention(items, "--retention"),
        promotion=args.promotion,
        draft=args.draft,
        replay_tokens=args.replay_tokens,
        # What a dropped unit must match is nobody's question where none is dropped.
        is_drop_strict=args.draft == "drop"
        and (args.drop_match or _DROP_MATCH.get(args.format)) == "writer",
        partial_hits=args.partial_hits == "true",
        path_cap=args.path_cap,
        codec=args.codec,
        eviction=args.eviction,
    )


def _json_list(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--retention is no JSON list: {error}") from error


def _rule(word: str) -> object:
    name, _, number = word.replace("=", ":").partition(":")
    if not number:
        return name
    return {name: int(number) if number.isdigit() else number}
