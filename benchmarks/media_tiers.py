"""What each image tier is worth: a conversation full of pictures, with one tier more each time.

Starts the whole stack with the micro checkpoint for each setting (no tier, L1, L1 and L2, L1 to
L3, all four) and plays the same conversation against each: one request with many pictures, the
same request again, then turns that add two pictures each. Counts what the stages did, by their own
counters and by the picture host, and refuses to report if two settings answer differently.

    python benchmarks/media_tiers.py [--pictures 150] [--turns 25] [--size 1000x800]
        [--settings none,L1,L1+L2,L1..L3,all]

At its full size a run without L3 encodes some 4,700 pictures, which takes hours on a small
processor; `--size 250x200`, or `--pictures 12 --turns 3`, shows the same shape in minutes.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from media_stack import PictureHost, Stack, jpeg, picture_host, running_stack

ADDED = 2
"""Pictures that a turn adds."""

MIB = 1024 * 1024
ROOM = {
    "K3_GATEWAY_MAX_IMAGES": "1000",
    "K3_GATEWAY_MAX_CONTEXT": "1000000",
    "K3_GATEWAY_REQUEST_TIMEOUT_S": "7200",
    "K3_PREFILL_EMBEDDINGS": str(256 * MIB),
    "K3_PREFILL_ARENA": str(1024 * MIB),
    "K3_DECODE_ARENA": str(1024 * MIB),
    "K3_PREPROCESSOR_CACHE": str(768 * MIB),
    "K3_UP_SEGMENT_BYTES": str(1024 * MIB),
}
"""The defaults are for a demonstration; this is for 200 pictures at once."""

OFF = {
    "L1": {"K3_FETCHER_L1": "false"},
    "L2": {"K3_PREPROCESSOR_CACHE": "0"},
    "L3": {"K3_ENCODER_CACHE": "0"},
}
SETTINGS = {
    "none": ("L1", "L2", "L3", "L4"),
    "L1": ("L2", "L3", "L4"),
    "L1+L2": ("L3", "L4"),
    "L1..L3": ("L4",),
    "all": (),
}
"""What is off. L4 has no switch: a salt of its own keeps a request from every other's prefix."""


@dataclass(frozen=True)
class Step:
    """One request: its time, what was done for it, what it answered."""

    seconds: float
    cpu_s: float
    num_pictures: int
    num_new: int
    num_downloads: int
    num_decodes: int
    num_encodes: int
    num_prefilled: int
    answer: str


def user_message(host: PictureHost, numbers: Sequence[int]) -> dict[str, Any]:
    """Some pictures and a question."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": host.url(number)}} for number in numbers
    ]
    return {"role": "user", "content": [*parts, {"type": "text", "text": "What changed?"}]}


async def take_step(
    stack: Stack, host: PictureHost, messages: Sequence[dict[str, Any]], num_new: int, salt: str
) -> Step:
    """Sends one request and counts."""
    before, asked, cpu_s = stack.made(), host.num_downloads, stack.cpu_s()
    started_s = time.perf_counter()
    status, body = await stack.ask(
        messages,
        max_completion_tokens=8,
        thinking={"type": "disabled"},
        **({"cache_salt": salt} if salt else {}),
    )
    seconds = time.perf_counter() - started_s
    if status != 200:
        raise SystemExit(f"the stack answered {status}: {body}")
    after, usage = stack.made(), body["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Step(
        seconds=seconds,
        cpu_s=stack.cpu_s() - cpu_s,
        num_pictures=sum(len(m["content"]) - 1 for m in messages if m["role"] == "user"),
        num_new=num_new,
        num_downloads=host.num_downloads - asked,
        num_decodes=after["L2"] - before["L2"],
        num_encodes=after["L3"] - before["L3"],
        num_prefilled=usage["prompt_tokens"] - cached,
        answer=body["choices"][0]["message"]["content"],
    )


@dataclass(frozen=True)
class Script:
    """The conversation: pictures of the first request, turns, and the pictures' size."""

    num_pictures: int
    num_turns: int
    width: int
    height: int


async def play(name: str, folder: Path, script: Script) -> list[Step]:
    """Plays the conversation against a stack with some tiers off."""
    off, num_pictures, num_turns = SETTINGS[name], script.num_pictures, script.num_turns
    variables = dict(ROOM)
    for tier in off:
        variables |= OFF.get(tier, {})
    async with picture_host() as host, running_stack(folder, **variables) as stack:
        for number in range(num_pictures + ADDED * num_turns):
            host.pictures[number] = jpeg(number, script.width, script.height)
        salts = iter(range(num_turns + 2))

        async def step(messages: Sequence[dict[str, Any]], num_new: int) -> Step:
            salt = f"apart {next(salts)}" if "L4" in off else ""
            found = await take_step(stack, host, messages, num_new, salt)
            print(
                f"  {name:7} {found.num_pictures:4} pictures {found.seconds:8.2f} s, {found.cpu_s:.2f} cpu s, "
                f"{found.num_downloads} downloads, {found.num_decodes} decodes, "
                f"{found.num_encodes} encodes, {found.num_prefilled} tokens",
                flush=True,
            )
            return found

        messages = [user_message(host, range(num_pictures))]
        steps = [await step(messages, num_pictures), await step(messages, 0)]
        for turn in range(num_turns):
            messages.append({"role": "assistant", "content": steps[-1].answer})
            first = num_pictures + ADDED * turn
            messages.append(user_message(host, range(first, first + ADDED)))
            steps.append(await step(messages, ADDED))
        return steps


def line(name: str, what: str, steps: Sequence[Step]) -> str:
    """One row of the table: means over some requests."""
    mean = lambda pick: sum(map(pick, steps)) / len(steps)  # noqa: E731 - read at a glance
    return (
        f"{name:8}{what:10}{mean(lambda s: s.seconds):10.2f}"
        f"{mean(lambda s: s.cpu_s):8.2f}"
        f"{mean(lambda s: s.num_pictures):10.1f}{mean(lambda s: s.num_new):6.1f}"
        f"{mean(lambda s: s.num_downloads):11.1f}{mean(lambda s: s.num_decodes):9.1f}"
        f"{mean(lambda s: s.num_encodes):9.1f}{mean(lambda s: s.num_prefilled):10.0f}"
    )


def show(played: dict[str, list[Step]]) -> bool:
    """Prints the table; says whether the full set of tiers worked for new pictures only."""
    print(
        f"\n{'tiers':8}{'request':10}{'seconds':>10}{'cpu s':>8}{'pictures':>10}{'new':>6}{'downloads':>11}"
        f"{'decodes':>9}{'encodes':>9}{'prefilled':>10}"
    )
    for name, steps in played.items():
        print(line(name, "first", steps[:1]))
        print(line(name, "again", steps[1:2]))
        if steps[2:]:
            print(line(name, "turns", steps[2:]))
    for name in ("L1..L3", "all"):
        for step in played.get(name, []):
            if (step.num_downloads, step.num_decodes, step.num_encodes) != (step.num_new,) * 3:
                print(f"{name}: a request with {step.num_new} new pictures did {step}")
                return False
    return True


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=150, help="in the first request")
    parser.add_argument("--turns", type=int, default=25, help="that add two pictures each")
    parser.add_argument("--size", default="1000x800", help="of a picture, pixels")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="which, by commas")
    arguments = parser.parse_args()
    width, height = map(int, arguments.size.split("x"))
    script = Script(arguments.pictures, arguments.turns, width, height)
    played: dict[str, list[Step]] = {}
    with tempfile.TemporaryDirectory(prefix="k3-media-") as name:
        for setting in arguments.settings.split(","):
            played[setting] = asyncio.run(play(setting, Path(name), script))
            answers = [[step.answer for step in steps] for steps in played.values()]
            if any(each != answers[0] for each in answers):
                raise SystemExit(f"{setting} answers differently; no figures: {answers}")
    if not show(played):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
