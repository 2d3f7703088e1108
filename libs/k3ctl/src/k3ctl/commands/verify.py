"""`k3 verify`: run a checkpoint on recorded inputs and compare with the recorded results."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from k3core.config import ConfigError
from k3core.engine.verify import Comparison, GoldenError, VerifyOptions, verify
from k3core.kernels.errors import BackendUnavailableError
from k3core.weights.errors import CheckpointError
from k3ctl.progress import stderr_bar
from k3ctl.subparsers import Subparsers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_ATOL = 2e-4


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("verify", help="compare a checkpoint with golden results")
    parser.add_argument("directory", type=Path, help="checkpoint in the released layout")
    parser.add_argument("--golden", type=Path, required=True, help="recorded run, safetensors")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument(
        "--atol",
        type=float,
        default=DEFAULT_ATOL,
        help="largest absolute difference allowed in any tensor (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--mode", choices=("auto", "expanded", "absorbed"), default="auto", help="form of MLA"
    )
    parser.add_argument("--chunk", type=_positive, help="tokens a prefill chunk (default: all)")
    parser.add_argument("--decode-from", type=_positive, help="feed one by one from here on")
    parser.add_argument("--kernels", default="auto", help="auto, reference or a backend's name")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the comparison; 1 past the tolerance, 2 where the files or the device do not fit."""
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("k3 verify: no CUDA device is available", file=sys.stderr)
        return 2
    options = VerifyOptions(
        device=torch.device(args.device),
        dtype=DTYPES[args.dtype],
        mla_form=args.mode,
        chunk=args.chunk,
        decode_from=args.decode_from,
        kernels=args.kernels,
        progress=None if args.json else stderr_bar("loading"),
    )
    try:
        comparisons = verify(args.directory, args.golden, options)
    except (ConfigError, CheckpointError, GoldenError, BackendUnavailableError) as error:
        print(f"k3 verify: {error}", file=sys.stderr)
        return 2
    failed = [c.name for c in comparisons if not c.max_abs <= args.atol]
    if args.json:
        rows = [asdict(c) for c in comparisons]
        print(json.dumps({"atol": args.atol, "passed": not failed, "tensors": rows}, indent=1))
    else:
        print(_table(comparisons, args.atol))
    return 1 if failed else 0


def _table(comparisons: tuple[Comparison, ...], atol: float) -> str:
    width = max(len(c.name) for c in comparisons)
    lines = [f"{'tensor':<{width}}  {'max |d|':>9}  {'mean |d|':>9}  {'rel norm':>9}  {'scale':>9}"]
    for c in comparisons:
        mark = "" if c.max_abs <= atol else "  FAIL"
        lines.append(
            f"{c.name:<{width}}  {c.max_abs:9.2e}  {c.mean_abs:9.2e}  "
            f"{c.relative_norm:9.2e}  {c.scale:9.3g}{mark}"
        )
    num_failed = sum(not c.max_abs <= atol for c in comparisons)
    verdict = "passed" if num_failed == 0 else f"{num_failed} past the tolerance"
    lines.append(f"{len(comparisons)} tensors, atol {atol:g}: {verdict}")
    return "\n".join(lines)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value
