"""`python -m train_nano`: train, evaluate and export k3-nano."""

import argparse
import json
import sys
from pathlib import Path

from train_nano.card import EVALUATION_FILE, write_card
from train_nano.drafts import DraftsPlan, make_drafts
from train_nano.evaluate import Evaluation
from train_nano.export import export, read_state
from train_nano.model import SEED, build_nano
from train_nano.probes import SKILLS
from train_nano.train import Plan, train

FOLDER = Path(".k3/train_nano")
CHECKPOINT = FOLDER / "checkpoint"
SHIPPED = Path("checkpoints/k3-nano")


def main() -> int:
    """Reads the command line and does what it says."""
    parser = argparse.ArgumentParser(prog="train_nano", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train, or go on training")
    training.add_argument("--folder", type=Path, default=FOLDER)
    training.add_argument("--minutes", type=float, default=150.0)
    training.add_argument("--eye-minutes", type=float, default=6.0)
    training.add_argument("--seed", type=int, default=SEED)
    training.add_argument("--rate", type=float, default=1.0, help="of the full learning rate")
    training.add_argument("--processes", type=int, default=2)
    training.set_defaults(run=_train)
    evaluation = commands.add_parser("evaluate", help="accuracy per skill of a checkpoint")
    evaluation.add_argument("--checkpoint", type=Path, default=SHIPPED)
    evaluation.add_argument("--share", type=float, default=1.0, help="of the questions")
    evaluation.add_argument("--skill", action="append", choices=list(SKILLS), help="only these")
    evaluation.add_argument("--seed", type=int, default=1)
    evaluation.add_argument(
        "--json",
        type=Path,
        help=f"of the figures; a full evaluation writes {EVALUATION_FILE} beside the weights",
    )
    evaluation.add_argument("--misses", action="store_true", help="show a few wrong answers")
    evaluation.set_defaults(run=_evaluate)
    exporting = commands.add_parser("export", help="write a run's state as a checkpoint")
    exporting.add_argument("--folder", type=Path, default=FOLDER)
    exporting.add_argument("--out", type=Path, default=CHECKPOINT)
    exporting.set_defaults(run=_export)
    drafting = commands.add_parser("drafts", help="train and measure both drafts of a checkpoint")
    drafting.add_argument("--target", type=Path, default=SHIPPED)
    drafting.add_argument("--minutes", type=float, default=10.0)
    drafting.add_argument("--seed", type=int, default=SEED)
    drafting.add_argument("--questions", type=int, default=40, help="held-out, of each group")
    drafting.set_defaults(run=_drafts)
    carding = commands.add_parser("card", help="write the model card of an evaluated checkpoint")
    carding.add_argument("--folder", type=Path, default=FOLDER, help="of the training run")
    carding.add_argument("--checkpoint", type=Path, default=SHIPPED)
    carding.set_defaults(run=_card)
    args = parser.parse_args()
    try:
        return args.run(args)
    except FileNotFoundError as error:
        print(
            f"{error.filename} is not there: train and export first, see docs/nano.md",
            file=sys.stderr,
        )
        return 2


def _train(args: argparse.Namespace) -> int:
    plan = Plan(args.folder, args.minutes, args.eye_minutes, args.seed, args.rate, args.processes)
    train(plan)
    return 0


def _export(args: argparse.Namespace) -> int:
    export(args.folder, args.out)
    size = sum(file.stat().st_size for file in args.out.rglob("*") if file.is_file())
    print(f"{args.out}: {size / 1e6:.1f} MB")
    return 0


def _drafts(args: argparse.Namespace) -> int:
    plan = DraftsPlan(args.target, args.minutes, args.seed, args.questions)
    print(make_drafts(plan))
    return 0


def _card(args: argparse.Namespace) -> int:
    named = build_nano().named_parameters()
    num_parameters = sum(p.numel() for name, p in named.items() if name != "objects")
    print(write_card(args.checkpoint, read_state(args.folder).num_steps, num_parameters))
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    """Prints a line a skill as it is measured; 1 if one misses its target."""
    evaluation = Evaluation(args.checkpoint, args.seed)
    figures: dict[str, dict[str, float | int]] = {}
    is_good = True
    for name in args.skill or SKILLS:
        result = evaluation.measure(name, args.share)
        low, high = result.interval
        is_missed = result.target is not None and result.accuracy < result.target
        is_good = is_good and not is_missed
        wanted = "" if result.target is None else f"  wanted {result.target:.0%}"
        print(
            f"{name:28} {result.accuracy:6.1%}  [{low:5.1%}, {high:6.1%}]"
            f"  of {result.num_probes:3}{wanted}{'  MISSED' if is_missed else ''}",
            flush=True,
        )
        for asked, right, said in result.misses if args.misses else ():
            print(f"    {asked}\n      wanted {right}\n      said   {said}")
        figures[name] = {
            "accuracy": result.accuracy,
            "low": low,
            "high": high,
            "questions": result.num_probes,
        }
    out = args.json
    if out is None and args.share == 1.0 and not args.skill:
        out = args.checkpoint / EVALUATION_FILE
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
