"""`k3 trace`: the spans of one request across all services, drawn as a waterfall."""

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from k3ctl import waterfall
from k3ctl.stack.state import run_folder
from k3ctl.subparsers import Subparsers
from k3wire.telemetry.ledger import Ledger

BAR_CELLS = 40
NUM_LISTED = 15

REQUEST_ID = "k3.request_id"
LEDGER = "k3.ledger"

WAIT_S = 1.0
"""Workers write their spans a few times a second."""

LOOK_S = 0.1

Span = dict[str, Any]


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command."""
    parser = subparsers.add_parser("trace", help="draw where a request's time went")
    parser.add_argument("request", nargs="?", default="", metavar="REQUEST-ID")
    parser.add_argument("--folder", type=Path, help="of the traces; by default that of `k3 up`")
    parser.add_argument("--list", action="store_true", help="list the latest requests")
    parser.add_argument("--json", action="store_true", help="print the spans as JSON lines")
    parser.set_defaults(run=run)


def read_spans(folder: Path) -> list[Span]:
    """Reads every process's file; a line that is still being written is skipped."""
    spans: list[Span] = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                spans.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return spans


def roots(spans: Iterable[Span]) -> list[Span]:
    """Finds the gateways' spans of requests, latest last."""
    found = [span for span in spans if REQUEST_ID in span["attributes"]]
    return sorted(found, key=lambda span: span["start_unix_ns"])


def draw(spans: list[Span], root: Span) -> str:
    """Draws one trace as a tree with bars."""
    trace = [span for span in spans if span["trace_id"] == root["trace_id"]]
    end_ns = max(span["end_unix_ns"] for span in trace)
    scale_ns = max(1, end_ns - root["start_unix_ns"])
    lines = [f"request {root['attributes'][REQUEST_ID]}, {scale_ns / 1e6:.1f} ms"]

    def add(span: Span, depth: int) -> None:
        lines.append(_row(span, depth, root["start_unix_ns"], scale_ns))
        children = [one for one in trace if one["parent_id"] == span["span_id"]]
        for child in sorted(children, key=lambda one: one["start_unix_ns"]):
            add(child, depth + 1)

    add(root, 0)
    # Spans whose parent was not written, because its process died, still belong to the request.
    known = {span["span_id"] for span in trace}
    for span in sorted(trace, key=lambda one: one["start_unix_ns"]):
        if span is not root and span["parent_id"] not in known:
            add(span, 1)
    return "\n".join(lines)


def _row(span: Span, depth: int, start_ns: int, scale_ns: int) -> str:
    attributes = span["attributes"]
    first = max(0, min(BAR_CELLS - 1, BAR_CELLS * (span["start_unix_ns"] - start_ns) // scale_ns))
    length = max(1, round(BAR_CELLS * (span["end_unix_ns"] - span["start_unix_ns"]) / scale_ns))
    last = min(BAR_CELLS, first + length)
    bar = " " * first + "#" * (last - first) + " " * (BAR_CELLS - last)
    tier = attributes.get("k3.tier", "none")
    note = "" if tier == "none" else f"{tier} {attributes.get('k3.outcome', '')}"
    if attributes.get("k3.saved_ms"):
        note += f", saved {attributes['k3.saved_ms']:.1f} ms"
    if "error.type" in attributes:
        note += f" error {attributes['error.type']}"
    spent_ms = (span["end_unix_ns"] - span["start_unix_ns"]) / 1e6
    return f"{'  ' * depth + span['name']:34}{spent_ms:9.1f} ms |{bar}| {note}"


def find_root(folder: Path, request_id: str, wait_s: float) -> tuple[list[Span], Span | None]:
    """Reads spans until the wanted request is there: workers write theirs a moment later.

    Args:
        folder: of the traces.
        request_id: which; "" is the latest.
        wait_s: how long a missing one is waited for.

    Returns:
        all spans, and the request's, None if it is not there.
    """
    deadline_s = time.monotonic() + wait_s
    while True:
        spans = read_spans(folder)
        for root in reversed(roots(spans)):
            if request_id in ("", root["attributes"][REQUEST_ID]):
                return spans, root
        if time.monotonic() > deadline_s:
            return spans, None
        time.sleep(LOOK_S)


def show(spans: list[Span], root: Span) -> str:
    """Gives the waterfall of stages and tiers, if the request got a first token, and all spans."""
    ledger = root["attributes"].get(LEDGER)
    head = [waterfall.draw(msgspec.json.decode(ledger, type=Ledger)), ""] if ledger else []
    return "\n".join([*head, draw(spans, root)])


def run(args: argparse.Namespace) -> int:
    """Runs the command; 1 if there is no such request."""
    folder = args.folder or run_folder() / "traces"
    if args.list:
        for root in roots(read_spans(folder))[-NUM_LISTED:]:
            spent_ms = (root["end_unix_ns"] - root["start_unix_ns"]) / 1e6
            print(f"{root['attributes'][REQUEST_ID]}  {spent_ms:9.1f} ms")
        return 0
    spans, root = find_root(folder, args.request, WAIT_S)
    if root is None:
        what = f"request {args.request}" if args.request else "any request"
        print(f"k3: no trace of {what} in {folder}; see `k3 trace --list`", file=sys.stderr)
        return 1
    if args.json:
        for span in spans:
            if span["trace_id"] == root["trace_id"]:
                print(json.dumps(span))
        return 0
    print(show(spans, root))
    return 0
