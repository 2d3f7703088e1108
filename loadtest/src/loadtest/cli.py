"""`k3-load SCENARIO.toml --url URL`: plays a scenario, writes raw records, prints the figures."""

import argparse
import asyncio
import json
import math
import sys
from pathlib import Path

from loadtest import metrics, record, runner, scenario, target


def main() -> int:
    """Runs the command line; 1 if any request failed."""
    parser = argparse.ArgumentParser(prog="k3-load", description=__doc__)
    parser.add_argument("scenario", type=Path, help="scenario file, see loadtest/scenarios")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the gateway")
    parser.add_argument("--api-key", default="", help="sent as a bearer token")
    parser.add_argument("--records", type=Path, help="write raw records here, as JSON lines")
    parser.add_argument("--json", action="store_true", help="print figures as one JSON object")
    arguments = parser.parse_args()
    try:
        plan = scenario.load_scenario(arguments.scenario)
        records = asyncio.run(runner.play(plan, arguments.url, arguments.api_key))
    except (scenario.ScenarioError, target.TargetError, OSError) as error:
        sys.stderr.write(f"k3-load: {error}\n")
        return 2
    if arguments.records:
        record.write_records(arguments.records, records)
    figures = metrics.summarise(records, plan)
    if arguments.json:
        # JSON has no word for what there were no samples of.
        known = {name: None if math.isnan(value) else value for name, value in figures.items()}
        sys.stdout.write(json.dumps(known) + "\n")
    else:
        sys.stdout.write(f"{plan.name}: seed {plan.seed}, {plan.rate_rps:g} requests/s\n")
        for name, value in figures.items():
            sys.stdout.write(f"  {name:22}{value:12.3f}\n")
    return 1 if figures["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
