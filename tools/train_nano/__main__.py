"""`python -m train_nano`: train, evaluate and export k3-nano."""

import argparse
import sys
from pathlib import Path

from train_nano.model import SEED
from train_nano.train import Plan, train


def main() -> int:
    """Reads the command line and does what it says."""
    parser = argparse.ArgumentParser(prog="train_nano", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train, or go on training")
    training.add_argument("--folder", type=Path, default=Path(".k3/train_nano"))
    training.add_argument("--minutes", type=float, default=150.0)
    training.add_argument("--eye-minutes", type=float, default=6.0)
    training.add_argument("--seed", type=int, default=SEED)
    training.add_argument("--processes", type=int, default=2)
    training.set_defaults(run=_train)
    args = parser.parse_args()
    return args.run(args)


def _train(args: argparse.Namespace) -> int:
    train(Plan(args.folder, args.minutes, args.eye_minutes, args.seed, args.processes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
