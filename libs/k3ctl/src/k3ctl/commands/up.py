"""`k3 up`: starts the whole stack on loopback and keeps it running."""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from k3ctl.checkpoints import NoCheckpoint, find_checkpoint
from k3ctl.stack.infrastructure import MissingProgram
from k3ctl.stack.plan import SERVICES, StackPlan
from k3ctl.stack.settings import read_up_settings
from k3ctl.stack.state import StackState, read_state, run_folder
from k3ctl.stack.supervisor import StackFailed, Supervisor
from k3ctl.subparsers import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command."""
    parser = subparsers.add_parser("up", help="start the whole stack and keep it running")
    parser.add_argument("--checkpoint", default=os.environ.get("K3_CHECKPOINT", ""), metavar="DIR")
    parser.add_argument("--engine", choices=("model", "scripted"), default="model")
    parser.add_argument(
        "--script", default="", metavar="FILE", help="answers, for --engine scripted"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object when ready")
    parser.add_argument("--port", type=int, help="of the gateway; a free one by default")
    parser.add_argument(
        "--workers", action="append", default=[], metavar="ROLE=N", help="processes of a role"
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        choices=SERVICES,
        help="run the infrastructure and just this role; may be repeated",
    )
    parser.set_defaults(run=run)


def parse_workers(given: list[str]) -> dict[str, int]:
    """Reads `ROLE=N` options.

    Raises:
        ValueError: an unknown role, or no count from 1 on.
    """
    counts: dict[str, int] = {}
    for text in given:
        role, _, count = text.partition("=")
        if role not in SERVICES or role == "gateway" or not count.isdigit() or int(count) < 1:
            allowed = ", ".join(name for name in SERVICES if name != "gateway")
            raise ValueError(f"--workers takes ROLE=N with N from 1 on, ROLE one of {allowed}")
        counts[role] = int(count)
    return counts


def run(args: argparse.Namespace) -> int:
    """Runs the command."""

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def on_ready(state: StackState) -> None:
        if args.json:
            print(msgspec.json.encode(state).decode(), flush=True)
            return
        say(f"ready after {state.ready_after_s:.1f} s: {state.gateway_url}")
        say('try: k3 ask "hello" --stream   or   k3 status   (Ctrl-C stops everything)')

    folder = run_folder()
    running = read_state(folder)
    if running is not None:
        say(f"k3: a stack runs already in {folder} (pid {running.supervisor_pid})")
        return 1
    if args.engine == "scripted" and not Path(args.script).is_file():
        say("k3: --engine scripted needs --script FILE.jsonl")
        return 2
    environment = dict(os.environ)
    if args.port is not None:
        environment["K3_GATEWAY_PORT"] = str(args.port)
    try:
        plan = StackPlan(
            folder=folder,
            checkpoint=find_checkpoint(args.checkpoint, say),
            settings=read_up_settings(environment),
            environment=environment,
            engine=args.engine,
            script=str(Path(args.script).resolve()) if args.script else "",
            num_workers=parse_workers(args.workers),
            only=tuple(args.only),
        )
        asyncio.run(supervise(Supervisor(plan, say), on_ready))
    except (StackFailed, MissingProgram, NoCheckpoint, ValueError) as error:
        say(f"k3: {error}")
        return 1
    return 0


async def supervise(supervisor: Supervisor, on_ready: Callable[[StackState], None]) -> None:
    """Runs a supervisor until a signal; a second one ends everything at once."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, supervisor.interrupt)
    await supervisor.run(on_ready)
