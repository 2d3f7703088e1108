"""`k3 ask`: one question to the running stack, and where its time went."""

import argparse
import asyncio
import os
import sys
from typing import Any

import aiohttp

from k3ctl.client import Answer, AskFailed, Client, question
from k3ctl.stack.plan import API_KEY
from k3ctl.stack.state import read_state, run_folder
from k3ctl.subparsers import Subparsers
from k3ctl.terminal import printable
from k3ctl.waterfall import draw


def add_parser(subparsers: Subparsers) -> None:
    """Adds the command."""
    parser = subparsers.add_parser("ask", help="ask the running stack a question")
    parser.add_argument("text")
    parser.add_argument("--image", action="append", default=[], metavar="FILE|URL")
    parser.add_argument("--stream", action="store_true", help="show the answer as it comes")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--effort",
        choices=("none", "low", "high", "max"),
        help="how much to think; by default as much as the server's clients do who do not say",
    )
    parser.add_argument("--url", default="", help="gateway; by default that of `k3 up` here")
    parser.add_argument("--api-key", default=os.environ.get(API_KEY, ""))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command; 1 if there is no answer."""
    state = read_state(run_folder())
    url = args.url or (state.gateway_url if state else "")
    if not url:
        print("k3: no stack runs here; start one with `k3 up`, or give --url", file=sys.stderr)
        return 1
    try:
        return asyncio.run(_ask(args, url))
    except AskFailed as error:
        print(f"k3: {error}", file=sys.stderr)
        return 1


async def _ask(args: argparse.Namespace, url: str) -> int:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        client = Client(url, session, args.api_key)
        body: dict[str, Any] = {
            "model": await client.model(),
            "messages": question(args.text, args.image),
            "max_completion_tokens": args.max_tokens,
            "temperature": args.temperature,
        }
        if args.effort:
            body["reasoning_effort"] = args.effort
        answer = await (show_stream(client, body) if args.stream else client.ask(body))
        show(answer, has_shown_text=args.stream)
    return 0


async def show_stream(client: Client, body: dict[str, Any]) -> Answer:
    """Prints pieces as they come; gives the whole answer.

    Raises:
        AskFailed: as `Client.stream`.
    """
    last = ""
    async for piece in client.stream(body):
        match piece:
            case (kind, text):
                if kind != last:
                    start = "\n" if last else ""
                    print(f"{start}[{'thinking' if kind == 'reasoning' else 'answer'}] ", end="")
                    last = kind
                print(printable(text), end="", flush=True)
            case Answer():
                print()
                return piece
    raise AskFailed("the stream ended before the answer did")


def show(answer: Answer, *, has_shown_text: bool = False) -> None:
    """Prints an answer and its waterfall."""
    if not has_shown_text:
        if answer.reasoning:
            print(f"[thinking] {printable(answer.reasoning)}")
        print(f"[answer] {printable(answer.text)}")
    usage = answer.usage
    print(
        f"({answer.finish}; prompt {usage['prompt_tokens']} tokens, "
        f"{usage['prompt_tokens_details']['cached_tokens']} of them cached; "
        f"answer {usage['completion_tokens']})"
    )
    if answer.ledger is not None:
        print(draw(answer.ledger))
    print(f"request {answer.request_id}")
