"""`k3 demo`: starts everything, asks about a bundled picture, shows what the tiers saved."""

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp

from k3ctl.checkpoints import NoCheckpoint, find_checkpoint
from k3ctl.client import AskFailed, Client, question
from k3ctl.commands.ask import show
from k3ctl.commands.status import describe, listen
from k3ctl.commands.up import supervise
from k3ctl.demo_picture import draw_picture
from k3ctl.stack.infrastructure import MissingProgram
from k3ctl.stack.plan import StackPlan
from k3ctl.stack.settings import read_up_settings
from k3ctl.stack.state import StackState
from k3ctl.stack.supervisor import StackFailed, Supervisor
from k3ctl.subparsers import Subparsers
from k3ctl.waterfall import skipped

QUESTION = "What is in this picture?"
PICTURE = "checkpoints/k3-nano/shapes.png"
"""The demo's picture, where a clone keeps it."""

SECOND_QUESTION = "Is the red circle left or right of the blue square?"


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command."""
    parser = subparsers.add_parser("demo", help="start, ask about a picture three times, stop")
    parser.add_argument("--checkpoint", default=os.environ.get("K3_CHECKPOINT", ""), metavar="DIR")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; 1 if any step fails, 130 if it was stopped."""

    def say(text: str) -> None:
        print(text, flush=True)

    try:
        checkpoint = find_checkpoint(args.checkpoint, say)
        with tempfile.TemporaryDirectory(prefix="k3-demo-") as folder:
            plan = StackPlan(
                folder=Path(folder),
                checkpoint=checkpoint,
                settings=read_up_settings(os.environ),
                environment=dict(os.environ),
            )
            if not asyncio.run(_demo(plan, say)):
                return 130
    except (StackFailed, MissingProgram, NoCheckpoint, AskFailed) as error:
        print(f"k3: {error}", file=sys.stderr)
        return 1
    return 0


async def _demo(plan: StackPlan, say: Any) -> bool:
    """Runs the demonstration; False if a signal ended it early."""
    supervisor = Supervisor(plan, say)
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[StackState] = loop.create_future()

    def on_ready(state: StackState) -> None:
        if not ready.done():
            ready.set_result(state)

    try:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(supervise(supervisor, on_ready))
            await asyncio.wait([ready, running], return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                return False
            asking = group.create_task(_ask(ready.result(), say))
            stopping = group.create_task(supervisor.wait_stopping())
            try:
                await asyncio.wait([asking, stopping], return_when=asyncio.FIRST_COMPLETED)
            finally:
                asking.cancel()
                supervisor.stop()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return not asking.cancelled()


async def _ask(state: StackState, say: Any) -> None:
    found = describe(state, await listen(state.nats_url))
    say(
        f"ready after {state.ready_after_s:.1f} s at {state.gateway_url}, "
        f"{found['rss_bytes'] / 1e9:.2f} GB resident in all\n"
    )
    picture = Path(state.folder) / "shapes.png"
    picture.write_bytes(draw_picture())
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        client = Client(state.gateway_url, session)
        model = await client.model()
        body: dict[str, Any] = {
            "model": model,
            "messages": question(QUESTION, [str(picture)]),
            "max_completion_tokens": 96,
            "temperature": 0,
        }
        say(f"Q: {QUESTION}")
        show(await client.ask(body))
        say("\nThe same again: what is cached is not done twice.")
        second = await client.ask(body)
        show(second)
        assert second.ledger is not None
        say(skipped(second.ledger.lines))
        say(
            f"\nQ: {SECOND_QUESTION}\nThe same picture in a new question: L4 has what comes before it, L3 the picture."
        )
        body["messages"] = question(SECOND_QUESTION, [str(picture)])
        show(await client.ask(body))
    say(
        "\nWhat to try next:\n"
        "  k3 up                                keep it running\n"
        f"  k3 ask '{QUESTION}' --image {PICTURE}\n"
        "  k3 status; k3 trace; k3 doctor       look inside\n"
        "  k3 up --checkpoint DIR               serve a checkpoint of your own\n"
    )
