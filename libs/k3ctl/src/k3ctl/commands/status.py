"""`k3 status`: every process of the running stack, with what its heartbeat says."""

import argparse
import asyncio
import sys
from typing import Any

import msgspec

from k3ctl.stack.state import StackState, read_state, resident_bytes, run_folder
from k3ctl.subparsers import Subparsers
from k3wire.bus.nats_bus import NatsBus
from k3wire.errors import TierUnavailable
from k3wire.messages.control import Heartbeat
from k3wire.service.directory import Directory

LISTEN_S = 0.35
"""Three heartbeats and a little."""


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command."""
    parser = subparsers.add_parser("status", help="list the running stack's processes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


async def listen(nats_url: str) -> list[Heartbeat]:
    """Collects a beat of every worker that is alive."""
    try:
        bus = await NatsBus.connect(nats_url, "k3 status")
    except TierUnavailable:
        return []
    directory = Directory()
    await directory.follow(bus)
    await asyncio.sleep(LISTEN_S)
    await bus.close()
    return directory.all()


def describe(state: StackState, beats: list[Heartbeat]) -> dict[str, Any]:
    """Joins the supervisor's list with the heartbeats."""
    by_pid = {beat.pid: beat for beat in beats}
    rows: list[dict[str, Any]] = []
    for process in state.processes:
        beat = by_pid.get(process.pid)
        rows.append(
            {
                "role": process.role,
                "name": process.name,
                "id": beat.worker_id if beat else "",
                "pid": process.pid,
                "phase": process.phase,
                "ready": beat.is_ready if beat else None,
                "reason": beat.reason if beat else "",
                "epoch": beat.epoch if beat else None,
                "restarts": process.num_restarts,
                "load": msgspec.to_builtins(beat.load) if beat else None,
                "rss_bytes": resident_bytes(process.pid),
            }
        )
    # The supervisor's family is the whole stack.
    total = resident_bytes(state.supervisor_pid)
    return {
        "gateway_url": state.gateway_url,
        "ready": state.is_ready,
        "ready_after_s": state.ready_after_s,
        "checkpoint": state.checkpoint,
        "engine": state.engine,
        "rss_bytes": total,
        "workers": rows,
    }


def run(args: argparse.Namespace) -> int:
    """Runs the command; 1 if no stack runs."""
    state = read_state(run_folder())
    if state is None:
        print("k3: no stack runs here; start one with `k3 up`", file=sys.stderr)
        return 1
    found = describe(state, asyncio.run(listen(state.nats_url)))
    if args.json:
        print(msgspec.json.encode(found).decode())
        return 0
    print(f"{found['gateway_url']}   {found['checkpoint']}   engine {found['engine']}")
    print(f"{'process':18}{'pid':>8}  {'state':14}{'running':>8}{'waiting':>8}{'MiB':>8}  id")
    for row in found["workers"]:
        load = row["load"] or {}
        word = "ready" if row["ready"] else (row["reason"] or row["phase"])
        print(
            f"{row['name']:18}{row['pid']:>8}  {word[:13]:14}{load.get('num_running', ''):>8}"
            f"{load.get('num_waiting', ''):>8}{row['rss_bytes'] / 2**20:8.0f}  {row['id']}"
        )
    print(
        f"resident in all {found['rss_bytes'] / 1e9:.2f} GB; "
        f"ready after {found['ready_after_s']:.1f} s"
    )
    return 0
