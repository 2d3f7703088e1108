"""`k3 simulate`: run cache scenarios with exact checks, or replay a trace through the cache."""

import argparse
import json
import sys
from pathlib import Path

from k3core.cache.spec import CacheError
from k3core.simulate.scenario_file import ScenarioError, read_cases
from k3core.simulate.steps import run_case
from k3ctl.subparsers import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("simulate", help="run cache scenarios, or replay a trace")
    parser.add_argument("--scenario", type=Path, action="append", default=[], help="JSON file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one JSON object a case; 1 if an expectation fails, 2 if a file cannot be run."""
    status = 0
    for path in args.scenario:
        try:
            cases = read_cases(json.loads(path.read_text()))
            for case in cases:
                result = run_case(case)
                print(json.dumps(result))
                if not result["ok"]:
                    print(f"k3 simulate: {case.name}: {result['failures'][0]}", file=sys.stderr)
                    status = max(status, 1)
        except (ScenarioError, CacheError, OSError, ValueError) as error:
            print(f"k3 simulate: {path}: {error}", file=sys.stderr)
            status = 2
    return status
